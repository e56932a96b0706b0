"""`fivefold tokenize RECIPE`: turns a recipe's text into token files in the cache, ahead of training."""

from __future__ import annotations

from typing import Any

from fivefold.cli.options import JsonOption, LayoutOption, RecipeArgument, SetOption, print_json

EXAMPLES = [
    "fivefold tokenize quickstart",
    "fivefold tokenize gpt2-124m --set data.source=my_texts/ --set data.tokenizer=bpe:32000",
]


def tokenize(
    recipe: RecipeArgument, set_: SetOption = None, layout: LayoutOption = None, json: JsonOption = False
) -> None:
    """Tokenize a recipe's text ahead of training.

    The tokens go to the cache, where `fivefold train` finds them.
    """
    from fivefold.data import prepare, progress_bar
    from fivefold.recipe import load

    loaded = load(recipe, set_ or [], layout)
    with progress_bar() as progress:
        info = prepare(loaded, progress).info
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
