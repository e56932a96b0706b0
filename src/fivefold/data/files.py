"""Small helpers on files, shared by the rooms of `data`."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from fivefold.errors import UserError

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR}


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cache_folder(setting: str | None) -> Path:
    """Where tokenized data is kept: the recipe's data.cache, else $FIVEFOLD_CACHE, else ~/.cache/fivefold."""
    return Path(setting or os.environ.get("FIVEFOLD_CACHE") or "~/.cache/fivefold").expanduser().absolute()


def write_atomically(path: Path, text: str) -> None:
    """Writes the whole file or, if interrupted, nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


@contextlib.contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Makes the folder; a full disk or missing permission within becomes a UserError that names it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise UserError(
            f"cannot write the cache {error.filename or folder}: {error.strerror}; "
            "set data.cache or $FIVEFOLD_CACHE to a folder with room"
        ) from error


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[bool]:
    """Holds a lock between processes; calls waiting() if another has it. Yields False where the file system
    has no locks.

    Then callers may do the same work twice, which is wasteful but sound: results are deterministic and
    take their place by a rename.
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
