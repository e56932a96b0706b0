"""The checkpoints of a run: which stay, which are set aside, and copies of them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, count
from pathlib import Path

from fivefold.checkpoint.manifest import MANIFEST, Damaged
from fivefold.checkpoint.store import Reader, checkpoints, latest, step_in, threads
from fivefold.checkpoint.write import REPLACED
from fivefold.errors import UserError, system_error
from fivefold.files import flush, make_folder, open_file, own_word, remove, rename, stream

DAMAGED, LATER = "damaged", "later"
"""Before the names of checkpoints that are set aside: damaged ones, and those after one that a run went back to."""
CHUNK = 4 << 20


def prune(run: Path, last: int, every: int = 0) -> list[Path]:
    """Removes all checkpoints but the newest `last` and those of steps that `every` divides (0: none). Also removes
    what killed processes left of incomplete ones. Returns the checkpoints that were removed."""
    old = old_ones(checkpoints(run), last, every)
    for folder in old:
        with suppress(OSError):  # under another name, nobody takes what is left of it for a checkpoint
            rename(folder, folder.with_name(f".{folder.name}.removed"))
    for folder in (*old, *(run / "checkpoints").glob(".step-*")):
        remove(folder)
    return old


def recover(run: Path) -> None:
    """Gives a checkpoint its name back, if the process that replaced it was killed before the new one had it. Raises
    OSError: it cannot be renamed."""
    for old in (run / "checkpoints").glob(f".step-*{REPLACED}"):
        folder = old.with_name(old.name.removeprefix(".").removesuffix(REPLACED))
        if not folder.exists():
            rename(old, folder)


def old_ones(folders: Sequence[Path], last: int, every: int) -> list[Path]:
    """Those that `prune` removes. folders: oldest first."""
    return [folder for folder in folders[:-last] if not every or step_in(folder) % every]


def set_aside(folder: Path, why: str) -> Path:
    """Renames a checkpoint, so that no run takes it. why: DAMAGED or LATER. Returns its new path. Raises OSError: it
    cannot be renamed."""
    names = chain([f"{why}-{folder.name}"], (f"{why}-{folder.name}-{number}" for number in count(2)))
    target = next(path for path in map(folder.with_name, names) if not path.exists())
    rename(folder, target)
    return target


def aside(run: Path) -> list[Path]:
    """The folders that were set aside."""
    home = run / "checkpoints"
    return sorted(path for why in (DAMAGED, LATER) for path in home.glob(f"{why}-step-*"))


def go_back(run: Path, chosen: Path) -> list[Path]:
    """Sets aside the checkpoints of a run that are later than a chosen one, so that the run goes on from that. A run
    without any may go on from another run's. Returns the new names of those set aside. Raises UserError: `chosen` is no
    checkpoint, is damaged, or is another run's and this run has its own."""
    if (chosen / "checkpoints").is_dir():
        raise UserError(
            f"--resume-from {chosen}: this is a run; name one of its checkpoints: {latest(chosen)}"
        )
    Reader(chosen)
    own = checkpoints(run)
    names = [folder.resolve() for folder in own]
    if chosen.resolve() not in names:
        if own:
            raise UserError(
                f"--resume-from {chosen}: this is not a checkpoint of {run}, which has its own, up to {own[-1]}. Name "
                "one of them, or another run folder"
            )
        return []
    moved = []
    for folder in own[names.index(chosen.resolve()) + 1 :]:
        try:
            moved.append(set_aside(folder, LATER))
        except OSError as error:
            raise UserError(f"{folder} cannot be set aside: {error.strerror}") from None
    return moved


def verify(folder: Path) -> str:
    """Reads and checks all files of a checkpoint. Returns what is wrong, or nothing. Raises UserError: a file cannot be
    read."""
    try:
        reader = Reader(folder)
        reader.check(*reader.files, threads=threads())
    except Damaged as error:
        return str(error)
    return ""


def copy(folder: Path, target: Path) -> Path:
    """Copies a checkpoint into the folder `target`, under its own name, and checks the copy. Returns it. Raises
    UserError: the checkpoint is damaged, `target` has one of this name, or it cannot be written."""
    out = target / folder.name
    if out.exists():
        raise UserError(f"{out} exists already")
    reader = Reader(folder)
    temporary = target / f".{folder.name}.{own_word()}"
    try:
        make_folder(temporary)
        for name in (*reader.files, MANIFEST):
            with open_file(folder / name) as content, stream(temporary / name) as copied:
                shutil.copyfileobj(content, copied, CHUNK)
            flush(temporary / name)
        written = Reader(temporary)
        if written.content != reader.content:
            raise Damaged(f"{folder} changed while it was copied")
        written.check(*written.files, threads=threads())
        flush(temporary)
        rename(temporary, out)
    except OSError as error:
        raise system_error(f"cannot copy {folder} to {out}: {error}", error) from None
    finally:
        remove(temporary)
    return out
