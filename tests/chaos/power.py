"""What a disk may hold after the power failed: the log of a run's writes, and every state that fits a prefix of it.

`files.writing.watch` logs each change. A file's content is safe once the file was flushed, a name once its folder was.
All else may be there or not: content may be missing, cut or zeros; of names the oldest changes, or any of them, may
have reached the disk. (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014, found all of these.)
"""

from __future__ import annotations

import fcntl
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fivefold.files import writing

HOW = ("flushed", "names", "cut", "zeros", "all", "first", "some")  # see `Disk.state`


@dataclass(frozen=True)
class Event:
    """A change: see `files.writing.watch`. Paths are relative to the logged folder. content: of a file, after it."""

    what: str
    path: Path
    target: Path | None
    content: bytes | None


class Log:
    """Logs the changes under a folder, from any number of processes, into one file outside of it."""

    def __init__(self, root: Path, log: Path):
        self.root, self.log = root.absolute(), log

    def __call__(self, what: str, path: Path, target: Path | None = None) -> None:
        path, target = path.absolute(), target and target.absolute()
        if not path.is_relative_to(self.root):
            return
        content = path.read_bytes() if what in ("write", "flush") and path.is_file() else None
        event = Event(what, path.relative_to(self.root), target and target.relative_to(self.root), content)
        with open(self.log, "ab", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(pickle.dumps(event))

    def events(self) -> list[Event]:
        found = []
        with open(self.log, "rb") as file:
            while file.peek(1):
                found.append(pickle.load(file))
        return found


@dataclass
class File:
    """now: as processes see it. safe: as flushed last."""

    now: bytes = b""
    safe: bytes = b""


@dataclass
class Folder:
    """now: the entries as processes see them. safe: as flushed last. since: the changes after that, oldest first, each
    (name that goes, name that comes, what comes)."""

    now: dict[str, File | Folder] = field(default_factory=dict)
    safe: dict[str, File | Folder] = field(default_factory=dict)
    since: list[tuple[str | None, str | None, File | Folder | None]] = field(default_factory=list)

    def change(self, goes: str | None, comes: str | None = None, node: File | Folder | None = None) -> None:
        self.since.append((goes, comes, node))
        _apply(self.now, self.since[-1:])

    def flush(self) -> None:
        self.safe, self.since = dict(self.now), []


def _apply(
    entries: dict[str, File | Folder], changes: list[tuple[str | None, str | None, File | Folder | None]]
) -> None:
    for goes, comes, node in changes:
        if goes is not None:
            entries.pop(goes, None)
        if comes is not None and node is not None:
            entries[comes] = node


class Disk:
    """The logged folder after some of the events."""

    def __init__(self) -> None:
        self.root = Folder()

    def add(self, event: Event) -> None:
        if event.path == Path("."):
            if event.what == "flush":
                self.root.flush()
            return
        try:
            parent, name = self._folder(event.path.parent), event.path.name
        except KeyError:
            assert event.what == "remove"  # of what was never there
            return
        node = parent.now.get(name)
        if event.what == "folder":
            parent.change(None, name, Folder())
        elif event.what == "rename":
            assert event.target is not None
            assert node is not None, event
            to = self._folder(event.target.parent)
            if to is parent:
                parent.change(name, event.target.name, node)
            else:
                to.change(None, event.target.name, node)
                parent.change(name)
        elif event.what == "remove":
            if isinstance(node, Folder):
                _empty(node)
            if node is not None:
                parent.change(name)
        elif isinstance(node, Folder):
            node.flush()
        else:
            if node is None:
                parent.change(None, name, node := File())
            node.now = event.content or b""
            if event.what == "flush":
                node.safe = node.now

    def _folder(self, path: Path) -> Folder:
        node: File | Folder = self.root
        for part in path.parts:
            assert isinstance(node, Folder)
            node = node.now[part]
        assert isinstance(node, Folder)
        return node

    def state(self, how: str, at: random.Random) -> dict[Path, bytes | None]:
        """A state that the disk may be in: content by path, None for folders.

        how: "flushed": nothing else; "names": all names, with the flushed content; "cut", "zeros", "all": all names,
        and unflushed content is cut, zeros or complete; "first": in each folder the oldest changes of names, "some":
        any of them, and unflushed content is any of these.
        """
        found: dict[Path, bytes | None] = {}
        _lay(self.root, Path(), how, at, found)
        return found


def _empty(folder: Folder) -> None:
    """Removes what is in a folder, one by one."""
    for name, node in list(folder.now.items()):
        if isinstance(node, Folder):
            _empty(node)
        folder.change(name)


def _lay(folder: Folder, path: Path, how: str, at: random.Random, found: dict[Path, bytes | None]) -> None:
    entries = dict(folder.safe)
    if how == "first":
        _apply(entries, folder.since[: at.randint(0, len(folder.since))])
    elif how == "some":
        _apply(entries, [change for change in folder.since if at.random() < 0.5])
    elif how != "flushed":
        entries = folder.now
    for name, node in entries.items():
        if isinstance(node, Folder):
            found[path / name] = None
            _lay(node, path / name, how, at, found)
        else:
            found[path / name] = _content(node, how, at)


def _content(file: File, how: str, at: random.Random) -> bytes:
    if file.now == file.safe or how in ("flushed", "names"):
        return file.safe
    if how in ("first", "some"):
        how = at.choice(("names", "cut", "zeros", "all"))
        return _content(file, how, at)
    appended = file.now.startswith(file.safe)
    same = len(file.safe) if appended else 0
    if how == "cut":
        return file.now[: at.randint(same, len(file.now))]
    if how == "zeros":
        return file.now[:same] + bytes(len(file.now) - same)
    return file.now


def write_out(state: dict[Path, bytes | None], folder: Path) -> None:
    """Makes a folder of a state."""
    folder.mkdir(parents=True)
    for path, content in state.items():
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)


def states(
    events: list[Event], how: tuple[str, ...] = HOW, seed: int = 1
) -> Iterator[tuple[int, str, dict[Path, bytes | None]]]:
    """(number of events, how, state) of all prefixes; the same state only once. how: the kinds of states."""
    disk, seen, at = Disk(), set(), random.Random(seed)
    for number, event in enumerate([None, *events]):
        if event is not None:
            disk.add(event)
        found = [(one, disk.state(one, at)) for one in how]
        keys = [hash(tuple(sorted(state.items(), key=lambda item: str(item[0])))) for _, state in found]
        for (one, state), key in zip(found, keys, strict=True):
            if (keys[0], key) not in seen:  # with the same flushed content
                seen.add((keys[0], key))
                yield number, one, state


def logged(root: Path, log: Path, work: Callable[[], object]) -> list[Event]:
    """Runs `work` in this process. Returns the changes under `root`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "watch", Log(root, log))
        work()
    return Log(root, log).events()
