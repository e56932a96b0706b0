"""Locks between processes: around shared work, of a folder's owner, and of those who are open to others."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TextIO

from fivefold.errors import BusyError, UserError
from fivefold.files import writing
from fivefold.files.guarded import inside
from fivefold.files.reading import parse_json, read_bytes
from fivefold.files.writing import make_folder, remove, rename


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Holds a lock between processes, and calls waiting() if another process has it.

    Yields False if the file system has no locks. Then callers may do the same work twice. That is safe, because results
    are deterministic and appear by a rename.
    """
    with open(inside(path), "w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(f, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True  # closing the file releases the lock, as does the end of the process, whatever ends it


def held(path: Path) -> IO[bytes] | None:
    """Locks a file, which is made if it is not there. None: another process has it. It is released by closing it, or by
    the end of the process.

    Raises:
        UserError: the file system has no locks.
    """
    file = open(os.open(inside(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b", buffering=0)  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    except BlockingIOError:
        file.close()
        return None
    except OSError as error:
        file.close()
        raise UserError(
            f"{path}: this file system has no locks ({error.strerror}). Set data.cache to a local disk"
        ) from None


class Post:
    """A small JSON file that says something while this object is open; it is locked as long."""

    ROOM = 2048

    def __init__(self, path: Path):
        self.path, before = path, path.with_name(f".{path.name}")
        self._file = held(before)
        rename(before, path)  # who looks for posts finds it locked

    def write(self, content: Any) -> None:
        text = json.dumps(content).encode().ljust(self.ROOM)
        assert len(text) == self.ROOM
        assert self._file is not None, "nobody else knows its name"
        os.pwrite(self._file.fileno(), text, 0)
        writing.watch("write", self.path)

    def close(self) -> None:
        if self._file is not None:
            remove(self.path)
            self._file.close()
            self._file = None


def posts(folder: Path, pattern: str) -> list[Any]:
    """What the open posts of a folder say. Those whose process has ended are removed."""
    found = []
    for path in folder.glob(pattern):
        try:
            if lock := held(path):
                remove(path)
                lock.close()
            else:
                found.append(parse_json(path.read_bytes()))
        except (OSError, ValueError):  # it has just been closed, or not yet been written
            continue
    return found


LOCK = ".lock"
LEAVING_S = 30.0  # how long a folder's owner whose launcher was killed may take to leave


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Makes a folder this process's own, and that of the processes forked from it, until they end or leave the block.

    Where the file system has no locks, nothing is checked.

    Raises:
        BusyError: another process has it. The message says which, on what host, since when.
    """
    make_folder(folder)
    path = folder / LOCK
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644), "r+") as f:
        with contextlib.suppress(OSError):
            _take(f, folder)
            f.truncate(0)
            f.seek(0)
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            f.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}) + "\n")
            f.flush()
        yield
        with contextlib.suppress(OSError):
            f.truncate(0)


def _take(f: TextIO, folder: Path) -> None:
    """Locks the file. Waits for an owner that has been killed and whose other processes are about to end."""
    until = time.monotonic() + LEAVING_S
    while True:
        try:
            return fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            f.seek(0)
            host, pid, since = _owner(f.read(1000))
        if host != socket.gethostname() or _alive(pid) or time.monotonic() > until:
            raise BusyError(
                f"{folder} is in use: process {pid} on {host} has trained in it since {since}. Stop it, or wait until "
                "it ends"
            )
        time.sleep(0.1)


def in_use(folder: Path) -> bool:
    """True if a process has made the folder its own (`owned`). It takes no lock, which could keep a run from starting,
    so a process of another host counts as long as it has not left."""
    try:
        text = read_bytes(folder / LOCK, 1000)
    except (OSError, UserError):
        return False
    host, pid, _ = _owner(text.decode("utf-8", "replace"))
    return pid > 0 and (host != socket.gethostname() or _alive(pid))


def _owner(text: str) -> tuple[str, int, str]:
    """(host, process, time) of a lock's owner. The file may hold anything."""
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        found = json.loads(text)
        host, since = (str(found.get(key, "?"))[:80] for key in ("host", "since"))
        if host.isprintable() and since.isprintable():
            return host, int(found.get("pid", 0)), since
    return "?", 0, "?"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
