"""`fivefold export RUN DIR` writes a model as a Hugging Face folder, `fivefold import DIR` makes a run of one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.options import JsonOption, RunArgument, StepOption, option, print_json, require_run
from fivefold.errors import UserError

EXAMPLES = ["fivefold export runs/first my-model", "fivefold import my-model --out runs/imported"]


def export(
    run: RunArgument,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write.")],
    step: StepOption = None,
    json: JsonOption = False,
) -> None:
    """Export a model as a Hugging Face folder.

    The folder holds safetensors weights, config.json and the tokenizer. transformers loads it as it is.
    """
    require_run(run, look=False)
    from fivefold.checkpoint import store
    from fivefold.checkpoint.hf import export_run

    export_run(run, folder, checkpoint=store.chosen(run, step))
    print_json({"folder": str(folder)}) if json else print(folder)


def import_(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with config.json and safetensors.")],
    out: Annotated[Path, option("RUN", "Run folder to write.")],
    json: JsonOption = False,
) -> None:
    """Import a Hugging Face folder as a run.

    Works for Llama, Mistral, Qwen3, OLMo 2, Mixtral, GPT-2 and BERT models. Generate from the run, or train it further.
    """
    if not (folder / "config.json").is_file():
        raise UserError(f"'{folder}' is not a Hugging Face model: it has no config.json")
    from fivefold.checkpoint.hf import import_folder

    import_folder(folder, out)
    print_json({"run": str(out)}) if json else print(out)
