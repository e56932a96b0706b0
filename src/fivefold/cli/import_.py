"""`fivefold import DIR`: makes a run of a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.options import JsonOption, option, print_json
from fivefold.errors import UserError

EXAMPLES = ["fivefold import my-model --out runs/imported"]


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
