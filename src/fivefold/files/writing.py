"""All writes of the program, the cache folder, and locks between processes: around shared work, of a folder's owner,
and of those who are open to others.

What is not flushed may be lost, cut or filled with zeros when the power fails, and a new name may reach the disk before
the data that it names. So what has to be there afterwards is written by `write_atomically`, or under a temporary name,
flushed with `flush` and given its name by `rename`. Every change calls `watch`, so that a test can replay what a disk
may hold at any moment (`tests/chaos/power.py`). `tests/test_homes.py` finds writes that go another way.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TextIO

from fivefold.errors import BusyError, UserError, system_error
from fivefold.files.reading import inside, parse_json, read_bytes

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR}
NOT_FLUSHED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}
"""What file systems say that cannot flush a folder, or a special file."""


def cache_folder(setting: str | None = None) -> Path:
    """The folder for data kept between runs: `setting` (the recipe's data.cache), $FIVEFOLD_CACHE or ~/.cache/fivefold.

    Without a home folder it is one of this user's under the temporary folder.
    """
    for key, path in (("data.cache", setting), ("FIVEFOLD_CACHE", os.environ.get("FIVEFOLD_CACHE"))):
        if path:
            return expanded(key, path).absolute()
    try:
        return Path("~/.cache/fivefold").expanduser().absolute()
    except RuntimeError:  # no home folder: a user id that the system does not know, as in some containers
        return Path(tempfile.gettempdir(), f"fivefold-{os.getuid()}")


def expanded(key: str, path: str) -> Path:
    """`path` with a home folder in place of `~` or `~NAME`. key: its field. Raises UserError: there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{key} = {path}: no home folder {Path(path).parts[0]} on this machine") from None


def own_word() -> str:
    """A word for the name of a temporary file, which no other process has. Two hosts with a common disk may have
    processes of the same number."""
    return uuid.uuid4().hex[:12]


def watch(what: str, path: Path, target: Path | None = None) -> None:
    """Is called after each change. A test puts its own function here.

    what: "folder" (made), "write" (content is new), "flush", "remove", "rename" (to `target`).
    """


def write(path: Path, content: str | bytes) -> None:
    """Writes a file in place. An interruption or power cut may leave a part of it."""
    try:
        with stream(path) as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk names none
        raise
    watch("write", path)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes and flushes the whole file. If interrupted, the file is as before."""
    temporary = path.with_name(f".{path.name}.{own_word()}")
    try:
        write(temporary, content)
        flush(temporary)
        rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def stream(path: Path) -> IO[bytes]:
    """A new or emptied file to write bytes to. A pipe or a device has nothing to empty."""
    file = _opened(path, os.O_WRONLY | os.O_CREAT, "wb")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.truncate()
    watch("write", path)
    return file


def _opened(path: Path, flags: int, mode: str) -> IO[bytes]:
    """Opens a file as it is. A link that leads out of a guarded folder is found before anything is changed."""
    descriptor = os.open(inside(path), flags | os.O_CLOEXEC, 0o666)
    try:
        inside(path, descriptor)
        return open(descriptor, mode, buffering=0 if mode == "ab" else -1)
    except BaseException:
        os.close(descriptor)
        raise


def stream_on(path: Path, size: int) -> IO[bytes]:
    """A file of at least `size` bytes, cut there, to write behind them."""
    file = _opened(path, os.O_RDWR, "r+b")
    file.truncate(size)
    file.seek(size)
    watch("write", path)
    return file


class Lines:
    """A file to which lines of text are appended, each at once.

    A full or read-only disk is no error: `error` says why, and the lines are written as soon as that is possible.
    """

    def __init__(self, path: Path):
        self.path, self.error = path, ""
        self._left = b""
        self._file = _opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, "ab")
        watch("write", path)

    def write(self, line: str) -> None:
        self._left += f"{line}\n".encode()
        self._write()

    def _write(self) -> None:
        """Writes what is left."""
        try:
            while self._left:
                self._left = self._left[self._file.write(self._left) :]
            self.error = ""
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self.error = str(error.strerror)
        watch("write", self.path)

    def require(self) -> None:
        """Raises UserError: nobody finds the lines any more."""
        _require(self.path, os.fstat(self._file.fileno()))

    def flush(self) -> None:
        """Forces the lines to the disk. Closing did so already."""
        if self._file.closed:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            if error.errno not in NO_ROOM | NOT_FLUSHED:
                raise
        watch("flush", self.path)

    def close(self) -> None:
        """Writes what a full disk has kept back, if it can be written now: `error` says why not."""
        if not self._file.closed:
            self._write()
            self.flush()
        self._file.close()


def make_folder(path: Path, *, new: bool = False, mode: int = 0o777) -> None:
    """Makes a folder and those above it, and flushes their names. new: raises FileExistsError if it is there."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    inside(path).mkdir(mode, parents=True, exist_ok=not new)
    for folder in reversed(missing):
        watch("folder", folder)
        flush(folder.parent)


def numbered_folder(parent: Path, name: str) -> Path:
    """Makes a new folder with the first number that is free behind its name: parent/NAME-1, parent/NAME-2, ..."""
    number = 1
    while True:
        try:
            make_folder(folder := parent / f"{name}-{number}", new=True)
            return folder
        except FileExistsError:
            number += 1


def rename(source: Path, target: Path) -> None:
    """Gives a file or folder another name, in place of a file of that name, and flushes the name.

    The content has to be flushed before.
    """
    inside(target.parent)
    os.replace(source, target)
    watch("rename", source, target)
    for folder in {source.parent, target.parent}:
        flush(folder)


def remove(path: Path) -> None:
    """Removes a file or folder if it is there. What cannot be removed stays."""
    inside(path.parent)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
    watch("remove", path)


def flush(path: Path) -> None:
    """Forces the content of a file, or the names in a folder, to the disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:  # of folders that cannot be flushed, or not be read
        if error.errno not in {*NOT_FLUSHED, errno.EACCES} or not path.is_dir():
            raise
    watch("flush", path)


def flush_all(folder: Path) -> None:
    for path in folder.iterdir():
        flush_all(path) if path.is_dir() else flush(path)
    flush(folder)


@contextlib.contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Makes the folder. A full disk or a missing permission inside the block becomes a UserError that names it."""
    try:
        make_folder(folder)
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise system_error(
            f"cannot write the cache {error.filename or folder}: {error.strerror}; "
            "set data.cache or $FIVEFOLD_CACHE to a folder with free space that you may write to",
            error,
        ) from error


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
    the end of the process. Raises UserError: the file system has no locks."""
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
        watch("write", self.path)

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

    Where the file system has no locks, nothing is checked. Raises BusyError: another process has it. The message says
    which, on what host, since when."""
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


def require_owned(folder: Path) -> None:
    """Raises UserError: a folder that a process has made its own was removed or renamed since."""
    _require(folder / LOCK)


def _require(path: Path, own: os.stat_result | None = None) -> None:
    """Raises UserError: there is no such file any more, or not this `own` one."""
    try:
        there = path.stat()
        if own is None or os.path.samestat(there, own):
            return
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError:  # a disk that does not answer now
        return
    raise UserError(
        f"{path} was removed, renamed or replaced, perhaps with its folder. This ends, and writes nothing more there. "
        "What was saved is lost, unless the folder has another name now"
    )


def _take(f: TextIO, folder: Path) -> None:
    """Locks the file. Waits for an owner that has been killed and whose other processes are about to end."""
    until = time.monotonic() + LEAVING_S
    while True:
        try:
            return fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            f.seek(0)
            host, pid, since, alive = _owner(f.read(1000))
        if alive or time.monotonic() > until:
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
    _, pid, _, alive = _owner(text.decode("utf-8", "replace"))
    return pid > 0 and alive


def owner(folder: Path) -> int | None:
    """The process of this host that has made the folder its own. None: there is none. What the lock's file says may be
    anybody's word: the process must have that file open."""
    try:
        _, pid, _, alive = _owner(read_bytes(folder / LOCK, 1000).decode("utf-8", "replace"))
        there = os.stat(folder / LOCK)
        opened = [os.stat(file.path) for file in os.scandir(f"/proc/{pid}/fd")] if pid > 0 and alive else []
    except (OSError, UserError):
        return None
    return pid if any(os.path.samestat(there, one) for one in opened) else None


def _owner(text: str) -> tuple[str, int, str, bool]:
    """(host, process, time) of a lock's owner, and True if it may be alive: on another host it may. The file may hold
    anything."""
    host, pid, since = "?", 0, "?"
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        content = json.loads(text)
        names = [str(content.get(key, "?"))[:80] for key in ("host", "since")]
        if all(map(str.isprintable, names)):
            pid, (host, since) = int(content.get("pid", 0)), names
    try:
        if host == socket.gethostname():
            os.kill(pid, 0)
    except (OSError, OverflowError) as error:
        return host, pid, since, not isinstance(error, ProcessLookupError)
    return host, pid, since, True
