"""`fivefold tokenize RECIPE`: turns a recipe's text into token files in the cache, ahead of training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fivefold.cli.options import (
    JsonOption,
    LayoutOption,
    RecipeArgument,
    SetOption,
    option,
    print_json,
)

EXAMPLES = [
    "fivefold tokenize quickstart",
    "fivefold tokenize gpt2-124m --set data.source=my_texts/ --set data.tokenizer=bpe:32000",
    "fivefold tokenize quickstart --megatron tokens/stdlib",
]


def tokenize(
    recipe: RecipeArgument,
    set_: SetOption = None,
    layout: LayoutOption = None,
    megatron: Annotated[
        Path | None,
        option(
            "NAME",
            "Also write NAME_train and NAME_val, .bin and .idx, which Megatron-LM reads.",
            "--megatron",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Tokenize a recipe's text ahead of training.

    The tokens go to the cache, where `fivefold train` finds them. An interrupted command resumes where it stopped.
    """
    from fivefold.data import prepare, progress_bar
    from fivefold.data.preparation import finished, write_megatron
    from fivefold.recipe import load

    loaded = load(recipe, set_ or [], layout)
    with progress_bar() as progress:
        data = finished(prepare(loaded, progress), loaded, progress)
        info = dict(data.info)
        if megatron is not None:
            info["megatron"] = [str(path) for path in write_megatron(data, loaded, megatron)]
    if json:
        print_json(info)
        return
    for key, value in info.items():
        print(f"{key:12}  {_text(value)}")


def _text(value: Any) -> str:
    """A fact as text: 1,234 or yes or `train 1,234, val 56`."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(each)}" for key, each in value.items() if each != "")
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
