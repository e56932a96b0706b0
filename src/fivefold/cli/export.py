"""`fivefold export RUN DIR`: writes a trained model as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.options import JsonOption, RunArgument, StepOption, print_json, require_run

EXAMPLES = ["fivefold export runs/first my-model"]


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
