"""The cache folder, atomic writes and locks, for files that several processes use. No torch."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from fivefold.errors import UserError

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR}


def cache_folder(setting: str | None = None) -> Path:
    """The folder for data kept between runs: `setting` (the recipe's data.cache), $FIVEFOLD_CACHE or ~/.cache/fivefold.

    Without a home folder it is one of this user's under the temporary folder.
    """
    path = Path(setting or os.environ.get("FIVEFOLD_CACHE") or "~/.cache/fivefold")
    try:
        return path.expanduser().absolute()
    except RuntimeError:  # no home folder: a user id that the system does not know, as in some containers
        return Path(tempfile.gettempdir(), f"fivefold-{os.getuid()}")


def own_word() -> str:
    """A word for the name of a temporary file, which no other process has. Two hosts with a common disk may have
    processes of the same number."""
    return uuid.uuid4().hex[:12]


def write_atomically(path: Path, text: str) -> None:
    """Writes the whole file, or nothing if interrupted."""
    temporary = path.with_name(f".{path.name}.{own_word()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


@contextlib.contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Makes the folder. A full disk or a missing permission inside the block becomes a UserError that names it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise UserError(
            f"cannot write the cache {error.filename or folder}: {error.strerror}; "
            "set data.cache or $FIVEFOLD_CACHE to a folder with free space"
        ) from error


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Holds a lock between processes, and calls waiting() if another process has it.

    Yields False if the file system has no locks. Then callers may do the same work twice. That is safe, because results
    are deterministic and appear by a rename.
    """
    with open(path, "w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(f, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True  # closing the file releases the lock, as does the end of the process, whatever ends it
