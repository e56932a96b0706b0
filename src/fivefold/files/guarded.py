"""Folders that others may have made: no link leads out of one."""

from __future__ import annotations

import os
from pathlib import Path

from fivefold.errors import UserError

_guarded: dict[Path, tuple[Path, ...]] = {}
"""Guarded folders, and where files in them may lie."""


def guard(folder: Path, *, look: bool = True) -> None:
    """From now on, nothing in this folder is opened, written or removed through a link that leads out of it.

    A run folder or a model may come from anybody, and a link in it would let them choose which file we overwrite. The
    folder itself may be a link. A snapshot of a Hugging Face cache may link to the blobs beside it.

    look: goes through the folder now, and refuses such links, and whatever is neither a file nor a folder (a pipe
    would block who opens it).

    Raises:
        UserError: the folder has one.
    """
    home = folder.absolute()
    real = Path(os.path.realpath(home))
    blobs = (real.parent.parent / "blobs",) if real.parent.name == "snapshots" else ()
    _guarded[home] = (real, *blobs)
    if look:
        _look_through(home)


def _look_through(folder: Path) -> None:
    waiting = [folder] if folder.is_dir() else []
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.is_symlink():
                    inside(path)
                elif entry.is_dir(follow_symlinks=False):
                    waiting.append(path)
                elif not entry.is_file(follow_symlinks=False):
                    raise UserError(f"{path} is neither a file nor a folder. Remove it")


def inside(path: Path, opened: int | None = None) -> Path:
    """Returns `path`, after a check that no link leads it out of a guarded folder. opened: the descriptor of the file
    that was found there: then its place counts, so nobody can have put a link there after the check.

    Raises:
        UserError: one does, or the path has a NUL.
    """
    if "\0" in str(path):
        raise UserError(f"{path} cannot be a file: its name has a NUL")
    if not _guarded:
        return path
    absolute = Path(os.path.abspath(path))
    for home, allowed in _guarded.items():
        if home in absolute.parents:
            real = _place(opened) if opened is not None else None
            real = real or Path(os.path.realpath(absolute))
            if not any(place == real or place in real.parents for place in allowed):
                raise UserError(
                    f"{path} leads out of {home}, to {real}. Links in run folders and models are not followed: put "
                    "the file itself there"
                )
    return path


def _place(descriptor: int) -> Path | None:
    """Where an open file lies, or lay before it was removed; None if the system does not say."""
    try:
        place = os.readlink(f"/proc/self/fd/{descriptor}")
        return Path(place if os.fstat(descriptor).st_nlink else place.removesuffix(" (deleted)"))
    except OSError:
        return None
