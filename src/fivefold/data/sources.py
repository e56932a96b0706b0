"""Finds the files that a recipe's `data.source` names."""

from __future__ import annotations

import difflib
import glob
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from fivefold.data.kinds import SUFFIXES, File, hub, named, remote
from fivefold.data.kinds.opening import PACKED
from fivefold.errors import UserError, several

# `stdlib` leaves out installed packages, tests (many distributions do not install them, so the set would differ between
# machines), and generated tables (encodings, documentation topics, build variables). 10 MB in 600 files remain.
STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


class Source(NamedTuple):
    """The files of a source.

    spec: the recipe's text. unknown: number of files of other kinds, by extension. hub: it is a data set of Hugging
    Face, one file without a size.
    """

    spec: str
    files: list[File]
    unknown: dict[str, int] = {}  # noqa: RUF012
    hub: bool = False

    @property
    def counted(self) -> list[File]:
        """Its files, if it has any that one can count."""
        return [] if self.hub else self.files

    @property
    def size(self) -> int:
        return sum(max(0, f.size) for f in self.files)

    @property
    def left_out(self) -> str:
        """The files of other kinds in words, or ""."""
        count = sum(self.unknown.values())
        return f"{several(count, 'file')} of other kinds left out: {_listed(self.unknown)}" if count else ""


def find(spec: str) -> Source:
    """The files of a source, sorted by name.

    Folders are searched recursively, without hidden folders and links to folders. Raises UserError if there are no
    files; the message names the nearest path.
    """
    if spec == "stdlib":
        return _stdlib()
    if spec.startswith(hub.PREFIX):
        hub.parse(spec)
        return Source(spec, [hub.file_of(spec)], hub=True)
    if not spec:
        raise UserError("data.source is empty; use a file, a folder, a glob, stdlib, tokens:PATH or hf:NAME")
    if remote.is_address(spec):
        return _of_kind(spec, [(e.name, Path(e.name), e) for e in remote.entries(spec)])
    path = Path(os.path.expanduser(spec))
    if path.is_dir():
        return _below(spec, path, _walk(path))
    if path.is_file():
        if named(path.name) is None:
            raise UserError(
                f"data.source: {spec}: unknown kind of file {_extension(path.name)}; {_known(path)}"
            )
        return _below(spec, path.parent, [path])
    if glob.has_magic(str(path)):
        matches = [Path(p) for p in set(glob.glob(str(path), recursive=True))]
        files = [p for p in matches if not p.is_dir()]
        if files:
            return _below(spec, _fixed_part(path), files)
        only = "only folders match" if matches else "no file matches"
        raise UserError(f"data.source: {only} {spec!r}; {nearest(_fixed_part(path))}")
    if path.exists():
        raise UserError(f"data.source: {spec!r} is neither a regular file nor a folder")
    hint = "; known words: stdlib, tokens:PATH, hf:NAME" if os.sep not in spec else ""
    raise UserError(f"data.source: no such file or folder: {spec!r}; {nearest(path)}{hint}")


def nearest(path: Path) -> str:
    """The nearest existing parent of a missing path, with a similar name in it if there is one."""
    missing = None
    while not path.exists() and path != path.parent:
        missing, path = path.name, path.parent
    here = f"{path.resolve()} exists"
    if missing is None or not path.is_dir():
        return here + ", but is not a regular file" * (not path.is_dir() and not path.is_file())
    try:
        close = difflib.get_close_matches(missing, os.listdir(path), n=1)
    except OSError:
        close = []
    return here + (f": did you mean {str(path / close[0])!r}?" if close else f" but holds no {missing!r}")


def _stdlib() -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [
        p
        for p in _walk(root, STDLIB_LEFT_OUT)
        if p.suffix == ".py" and not p.name.startswith("_sysconfigdata")
    ]
    if not paths:
        raise UserError(f"data.source = stdlib: this Python has no .py files in {root}; use a path instead")
    return _below("stdlib", root, paths)


def _walk(root: Path, left_out: Iterable[str] = ()) -> list[Path]:
    def fail(error: OSError) -> None:
        raise UserError(f"data.source: cannot read the folder {error.filename}: {error.strerror}")

    found = []
    for folder, subfolders, names in os.walk(root, onerror=fail):
        subfolders[:] = [s for s in subfolders if not s.startswith(".") and s not in left_out]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return found


def _below(spec: str, root: Path, paths: list[Path]) -> Source:
    return _of_kind(spec, [(p.relative_to(root).as_posix(), p, None) for p in paths])


def _of_kind(spec: str, found: list[tuple[str, Path, remote.Entry | None]]) -> Source:
    """The files of a known kind among (name, path, what a server says of it)."""
    files: list[File] = []
    unknown: Counter[str] = Counter()
    for name, path, entry in found:
        kind = named(name)
        if kind is None:
            unknown[_extension(name)] += 1
        elif entry is None:
            files.append(File(name, path.absolute(), kind[0].name, _size(path), kind[1]))
        else:
            files.append(File(name, path, kind[0].name, entry.size, kind[1], entry.url, entry.version))
    if not files:
        here = _listed(unknown) or "nothing"
        raise UserError(
            f"data.source: {spec}: no file of a known kind; found {here}; {_known(*(p for _, p, _ in found))}"
        )
    return Source(spec, sorted(files), dict(unknown))


def _extension(name: str) -> str:
    stem, extension = os.path.splitext(name.lower())
    if extension in PACKED:
        extension = os.path.splitext(stem)[1] + extension
    return extension or "(no extension)"


def _listed(kinds: dict[str, int]) -> str:
    most = Counter(kinds).most_common(5)
    return ", ".join(f"{count} {kind}" for kind, count in most) + (", ..." if len(kinds) > 5 else "")


def _size(path: Path) -> int:
    """Bytes of a file, or -1: of a dangling link, whose reader reports it as a bad document."""
    try:
        state = path.stat()
    except OSError:
        return -1
    if not stat.S_ISREG(state.st_mode):  # a pipe blocks its reader, and a device may have no end
        raise UserError(f"data.source: {path} is not a regular file")
    return state.st_size


def _fixed_part(pattern: Path) -> Path:
    """The folder before the first wildcard of a pattern."""
    first = next(i for i, part in enumerate(pattern.parts) if glob.has_magic(part))
    return Path(*pattern.parts[:first])


def _known(*paths: Path) -> str:
    hint = "; for token files write tokens:PATH" if any(p.suffix in (".bin", ".npy") for p in paths) else ""
    return f"known: {' '.join(SUFFIXES)}, and texts as {' '.join(PACKED)}{hint}"
