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
from typing import Literal, NamedTuple

from fivefold.errors import UserError

FileKind = Literal["text", "jsonl", "parquet"]
KINDS: dict[str, FileKind] = {
    ".txt": "text",
    ".md": "text",
    ".py": "text",
    ".jsonl": "jsonl",
    ".parquet": "parquet",
}

# `stdlib` leaves out installed packages, tests (many distributions do not install them, so the set would differ between
# machines), and generated tables (encodings, documentation topics, build variables). 10 MB in 600 files remain.
STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


class File(NamedTuple):
    """A file of the source.

    name: path below the source's root. It decides order and split, so the same tree gives the same data anywhere.
    size: bytes, or -1 if the file cannot be read.
    """

    name: str
    path: Path
    kind: FileKind
    size: int


class Source(NamedTuple):
    """The files of a source.

    spec: the recipe's text. ignored: number of files of other kinds. hub: (name, config) of a hub data set.
    """

    spec: str
    files: list[File]
    ignored: int = 0
    hub: tuple[str, str | None] | None = None

    @property
    def size(self) -> int:
        return sum(max(0, f.size) for f in self.files)


def find(spec: str) -> Source:
    """The files of a source, sorted by name.

    Folders are searched recursively, without hidden folders and links to folders. Raises UserError if there are no
    files; the message names the nearest path.
    """
    if spec == "stdlib":
        return _stdlib()
    if spec.startswith("hf:"):
        name, _, config = spec.removeprefix("hf:").partition(":")
        if not name:
            raise UserError("data.source = 'hf:': the name is missing; write hf:NAME or hf:NAME:CONFIG")
        return Source(spec, [], hub=(name, config or None))
    if not spec:
        raise UserError("data.source is empty; use a file, a folder, a glob, stdlib, tokens:PATH or hf:NAME")
    path = Path(os.path.expanduser(spec))
    if path.is_dir():
        return _of_kind(spec, path, _walk(path))
    if path.is_file():
        if path.suffix.lower() not in KINDS:
            raise UserError(
                f"data.source: {spec}: unknown kind of file {path.suffix or '(none)'}; {_known(path)}"
            )
        return Source(spec, [_file(path, path.parent)])
    if glob.has_magic(str(path)):
        matches = [Path(p) for p in set(glob.glob(str(path), recursive=True))]
        files = [p for p in matches if not p.is_dir()]
        if files:
            return _of_kind(spec, _fixed_part(path), files)
        only = "only folders match" if matches else "no file matches"
        raise UserError(f"data.source: {only} {spec!r}; {nearest(_fixed_part(path))}")
    hint = "; known words: stdlib, tokens:PATH, hf:NAME" if os.sep not in spec else ""
    raise UserError(f"data.source: no such file or folder: {spec!r}; {nearest(path)}{hint}")


def nearest(path: Path) -> str:
    """The nearest existing parent of a missing path, with a similar name in it if there is one."""
    missing = None
    while not path.exists() and path != path.parent:
        missing, path = path.name, path.parent
    here = f"{path.resolve()} exists"
    if missing is None or not path.is_dir():
        return here
    try:
        close = difflib.get_close_matches(missing, os.listdir(path), n=1)
    except OSError:
        close = []
    return here + (f": did you mean {str(path / close[0])!r}?" if close else f" but holds no {missing!r}")


def _stdlib() -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        _file(p, root)
        for p in _walk(root, STDLIB_LEFT_OUT)
        if p.suffix == ".py" and not p.name.startswith("_sysconfigdata")
    ]
    if not files:
        raise UserError(f"data.source = stdlib: this Python has no .py files in {root}; use a path instead")
    return Source("stdlib", sorted(files))


def _walk(root: Path, left_out: Iterable[str] = ()) -> list[Path]:
    def fail(error: OSError) -> None:
        raise UserError(f"data.source: cannot read the folder {error.filename}: {error.strerror}")

    found = []
    for folder, subfolders, names in os.walk(root, onerror=fail):
        subfolders[:] = [s for s in subfolders if not s.startswith(".") and s not in left_out]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return found


def _of_kind(spec: str, root: Path, paths: list[Path]) -> Source:
    files = sorted(_file(p, root) for p in paths if p.suffix.lower() in KINDS)
    if not files:
        kinds = Counter(p.suffix.lower() or "(no extension)" for p in paths).most_common(5)
        found = ", ".join(f"{count} {kind}" for kind, count in kinds) or "nothing"
        raise UserError(f"data.source: {spec}: no file of a known kind; found {found}; {_known(*paths)}")
    return Source(spec, files, len(paths) - len(files))


def _file(path: Path, root: Path) -> File:
    try:
        state = path.stat()
        size = state.st_size
        if not stat.S_ISREG(state.st_mode):  # a pipe blocks its reader, and a device may have no end
            raise UserError(f"data.source: {path} is not a regular file")
    except OSError:
        size = -1  # a dangling link; its reader reports it as a bad document
    return File(path.relative_to(root).as_posix(), path.absolute(), KINDS[path.suffix.lower()], size)


def _fixed_part(pattern: Path) -> Path:
    """The folder before the first wildcard of a pattern."""
    first = next(i for i, part in enumerate(pattern.parts) if glob.has_magic(part))
    return Path(*pattern.parts[:first])


def _known(*paths: Path) -> str:
    hint = "; for token files write tokens:PATH" if any(p.suffix in (".bin", ".npy") for p in paths) else ""
    return f"known: {' '.join(KINDS)}{hint}"
