"""`fivefold checkpoints RUN`: lists, verifies, prunes and copies a run's checkpoints. `fivefold export RUN DIR` writes
a model as a Hugging Face folder, `fivefold import DIR` makes a run of one."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from fivefold.cli.options import JsonOption, RunArgument, StepOption, flag, option, print_json, require_run
from fivefold.errors import CheckFailed, UserError

EXAMPLES = [
    "fivefold checkpoints runs/first",
    "fivefold checkpoints runs/first --verify",
    "fivefold checkpoints runs/first --copy /backup/first --step 40",
    "fivefold checkpoints runs/first --prune",
    "fivefold export runs/first my-model",
    "fivefold import my-model --out runs/imported",
]


def checkpoints(
    run: RunArgument,
    verify: Annotated[bool, flag("Read every file and compare it with the manifest.", "--verify")] = False,
    prune: Annotated[
        bool,
        flag(
            "Remove those that checkpoint.keep_last and keep_every do not keep, and those set aside.",
            "--prune",
        ),
    ] = False,
    copy: Annotated[Path | None, option("DIR", "Copy a checkpoint into this folder, checked.")] = None,
    step: Annotated[int | None, option("N", "With --copy: its step. [default: the newest]", min=0)] = None,
    json: JsonOption = False,
) -> None:
    """List, verify, prune or copy the checkpoints of a run.

    Checkpoints that were set aside (damaged-..., later-...) are listed, too. No run resumes from one unless you rename
    it.
    """
    require_run(run)
    from fivefold.checkpoint import keep, store

    found: dict[str, Any] = {"run": str(run)}
    if step is not None and copy is None:
        raise UserError("--step: only with --copy")
    if copy is not None:
        source = store.latest(run) if step is None else store.folder_of(run, step)
        found["copied"] = str(keep.copy(source, copy))
    if prune:
        found["removed"] = [str(folder) for folder in _prune(run)]
    rows = [(folder, _row(folder, verify)) for folder in (*store.checkpoints(run), *keep.aside(run))]
    # a run that trains has removed others meanwhile
    found["checkpoints"] = [row for folder, row in rows if folder.exists()]
    print_json(found) if json else _print(found)
    damaged = [row for row in found["checkpoints"] if row["damage"] and not row["aside"]]
    if damaged:
        raise CheckFailed(f"{len(damaged)} checkpoints are damaged: {', '.join(r['name'] for r in damaged)}")


def _prune(run: Path) -> list[Path]:
    from fivefold.checkpoint import keep, store
    from fivefold.files import owned, remove
    from fivefold.recipe import load

    section = load(str(run / "recipe.toml")).checkpoint
    with owned(run):
        there = store.checkpoints(run)
        old, aside = keep.old_ones(there, section.keep_last, section.keep_every), keep.aside(run)
        stay = [folder for folder in there if folder not in old]
        if (old or aside) and all(keep.verify(folder) for folder in stay[::-1]):  # also where none would stay
            said = "are damaged" if stay else "do not exist"
            raise UserError(f"{run}: the checkpoints that would stay {said}, so none is removed")
        for folder in aside:
            remove(folder)
        return [*keep.prune(run, section.keep_last, section.keep_every), *aside]


def _row(folder: Path, verify: bool) -> dict[str, Any]:
    """What there is to say about a checkpoint. damage: what is wrong, as far as it was looked at."""
    from fivefold.checkpoint import keep, store
    from fivefold.checkpoint.manifest import FORMAT, MANIFEST, Damaged, step_of

    row: dict[str, Any] = {"name": folder.name, "aside": step_of(folder.name) is None, "damage": ""}
    try:
        reader = store.Reader(folder)
        when = datetime.fromtimestamp((folder / MANIFEST).stat().st_mtime).astimezone()
    except (Damaged, FileNotFoundError) as error:
        return row | {"damage": str(error)}
    row |= {
        "step": reader.meta.get("step"),
        "tokens": reader.meta.get("tokens"),
        "format": FORMAT,
        "files": len(reader.files),
        "bytes": reader.manifest.bytes,
        "saved": when.isoformat(timespec="seconds"),
    }
    return row | {"damage": keep.verify(folder), "verified": True} if verify else row


def _print(found: dict[str, Any]) -> None:
    from fivefold.observe.format import size

    if "copied" in found:
        print(f"copied to {found['copied']}")
    for folder in found.get("removed", ()):
        print(f"removed {folder}")
    if not found["checkpoints"]:
        print(f"{found['run']} has no checkpoint yet")
    for row in found["checkpoints"]:
        parts = [f"{row['name']:<24}"]
        if "bytes" in row:
            parts += [f"{size(row['bytes']):>10}", f"format {row['format']}", row["saved"]]
        if row["damage"]:
            parts.append(row["damage"])
        elif row.get("verified"):
            parts.append("verified")
        print("  ".join(parts))


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
    from fivefold.checkpoint.source import export_run

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
    from fivefold.checkpoint.source import import_folder

    import_folder(folder, out)
    print_json({"run": str(out)}) if json else print(out)
