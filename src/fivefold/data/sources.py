"""Finds the files that a recipe's `data.source` names, hashes them, says which are held out, and reads their documents.

Stale tokens of a changed source are never used: a file is known by the SHA-256 of its content (1.7 GB/s per core with
the SHA extension). Hashing a terabyte at every start would take minutes, so the hash is remembered under the file's
size, modification time, change time and inode. The change time (ctime) makes this safe: the kernel updates it at every
write and utime(), and no program can set it. Clocks tick coarsely, so a file that changed less than two seconds before
it was hashed is hashed again (git's "racily clean" rule).
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import json
import os
import stat
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fivefold.data import foreign, talk
from fivefold.data.kinds import SUFFIXES, TOKEN_SUFFIXES, hub, kind_of, named, remote, token_kind
from fivefold.data.kinds.kind import BY_RULE, ENDED, PACKED, SPAN, TOKENS, VAL, Bad, Document, Fields, File
from fivefold.errors import UserError, several
from fivefold.files import write_atomically
from fivefold.host import cores

# `stdlib` leaves out installed packages, tests (many distributions do not install them, so the set would differ between
# machines), and generated tables (encodings, documentation topics, build variables). 10 MB in 600 files remain.
STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


class Source(NamedTuple):
    """The files of a source.

    spec: the recipe's text. unknown: number of files of other kinds, by extension. hub: it is a data set of Hugging
    Face, one file without a size. ids: its files hold ids, not text.
    """

    spec: str
    files: list[File]
    unknown: dict[str, int] = {}  # noqa: RUF012
    hub: bool = False
    ids: bool = False

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
        root = Path(sysconfig.get_path("stdlib"))
        library = [p for p in _walk(root, STDLIB_LEFT_OUT) if p.suffix == ".py"]
        if not library:
            raise UserError(
                f"data.source = stdlib: this Python has no .py files in {root}; use a path instead"
            )
        return _below(spec, root, [p for p in library if not p.name.startswith("_sysconfigdata")])
    if spec == talk.NAME:
        path = talk.written()
        return _below(spec, path.parent, [path])
    if spec.startswith(TOKENS):
        return Source(spec, _token_files(spec), ids=True)
    if spec.startswith(hub.PREFIX):
        foreign.refuse([Path(os.path.expanduser(hub.parse(spec).name))])
        return Source(spec, [File(spec, Path(spec), hub.HubRows.name, 0)], hub=True)
    if not spec:
        raise UserError(
            "data.source is empty; use a file, a folder, a glob, stdlib, talk, tokens:PATH or hf:NAME"
        )
    if remote.ADDRESS.match(spec):
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
    hint = "; known words: stdlib, talk, tokens:PATH, hf:NAME" if os.sep not in spec else ""
    raise UserError(f"data.source: no such file or folder: {spec!r}; {nearest(path)}{hint}")


def _token_files(spec: str) -> list[File]:
    """The files of `tokens:PATH`, sorted. PATH is a file, a folder with token files, a glob, or a name without .bin, as
    Megatron-LM has them."""
    given = spec.removeprefix(TOKENS)
    if not given:
        raise UserError("data.source = 'tokens:': the path is missing; write tokens:PATH")
    pattern = Path(os.path.expanduser(given))
    with_suffix = pattern.with_name(f"{pattern.name}.bin")
    if pattern.is_dir():
        paths = [p for p in pattern.iterdir() if token_kind(p)]
    elif pattern.is_file() or with_suffix.is_file():
        paths = [pattern if pattern.is_file() else with_suffix]
    else:
        paths = [p for p in map(Path, glob.glob(str(pattern), recursive=True)) if p.is_file()]
    foreign.refuse({pattern, *(p.parent for p in paths)})
    if not paths:
        known, there = ", ".join(TOKEN_SUFFIXES), nearest(pattern)
        if pattern.is_dir():
            suffixes = sorted({_extension(p.name) for p in pattern.iterdir() if p.is_file()})
            there = f"{pattern.resolve()} holds {', '.join(suffixes[:9]) or 'no file'}"
        raise UserError(f"data.source: no token file ({known}) at {spec!r}; {there}")
    of_index = {p: p.with_suffix(".bin") for p in paths if p.suffix == ".idx"}
    files = []
    for path in sorted({(b if (b := of_index.get(p, p)).is_file() else p).absolute() for p in paths}):
        kind = token_kind(path)
        if kind is None:
            raise UserError(
                f"data.source: {path}: token files end in .bin (nanoGPT, llm.c, Megatron-LM), .npy or .parquet"
            )
        files.append(File(path.name, path, kind.name, _size(path)))
    return files


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


def _walk(root: Path, left_out: Iterable[str] = ()) -> list[Path]:
    def fail(error: OSError) -> None:
        raise UserError(f"data.source: cannot read the folder {error.filename}: {error.strerror}")

    paths = []
    for folder, subfolders, names in os.walk(root, onerror=fail):
        subfolders[:] = [s for s in subfolders if not s.startswith(".") and s not in left_out]
        paths += [Path(folder, name) for name in names if not name.startswith(".")]
    return paths


def _below(spec: str, root: Path, paths: list[Path]) -> Source:
    foreign.refuse({p.parent for p in paths if p.name in (*foreign.DATASETS, foreign.INDEX)})
    return _of_kind(spec, [(p.relative_to(root).as_posix(), p, None) for p in paths])


def _of_kind(spec: str, named_files: list[tuple[str, Path, remote.Entry | None]]) -> Source:
    """The files of a known kind among (name, path, what a server says of it)."""
    files: list[File] = []
    unknown: Counter[str] = Counter()
    for name, path, entry in named_files:
        kind = named(name)
        if kind is None:
            unknown[_extension(name)] += 1
        elif entry is None:
            file = File(name, path.absolute(), kind[0].name, _size(path), kind[1])
            if len(named_files) > 1 and not kind[0].claims(file):
                unknown[_extension(name)] += 1
            else:
                files.append(file)
        else:
            files.append(File(name, path, kind[0].name, entry.size, kind[1], entry.url, entry.version))
    if not files:
        here = _listed(unknown) or "nothing"
        raise UserError(
            f"data.source: {spec}: no file of a known kind; found {here}; {_known(*(p for _, p, _ in named_files))}"
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


Place = Sequence[int]
"""Where reading continues: [file, bytes or rows of it that are done]. [] is the start."""


@dataclass(frozen=True)
class FileSplit:
    """The files of a source and their split. A text file is one document and belongs to one split.

    val: held-out files. cut: the byte where the validation part of a single text begins. pieces: the megabytes of a
    single text are held out by their hashes instead, as documents are.
    """

    files: list[File]
    val: frozenset[int] = frozenset()
    cut: int | None = None
    pieces: bool = False

    @property
    def single(self) -> bool:
        """The source is one text. It needs no end token to separate documents (as in nanoGPT's split)."""
        return len(self.files) == 1 and kind_of(self.files[0]).one_document

    def documents(self, fields: Fields, start: Place) -> Iterator[tuple[Document | Bad, Place]]:
        """The documents of all files from a place on, and the place behind each."""
        for number in range(start[0] if start else 0, len(self.files)):
            begin = start[1] if start and number == start[0] else 0
            for document, place in self.read(number, fields, begin):
                yield document, [number, place]

    def read(self, number: int, fields: Fields, begin: int = 0) -> Iterator[tuple[Document | Bad, int]]:
        """The documents of a file from a place on, and the place behind each."""
        if begin == ENDED:
            return
        file = self.files[number]
        kind = kind_of(file)
        for document, place in kind.read(number, file, begin, fields, self.cut):
            if isinstance(document, Document) and kind.one_document:
                split = BY_RULE if self.pieces else VAL if number in self.val else document.split
                document = document._replace(split=split, ends=document.ends and not self.single)
            yield document, place

    def samples(self, fields: Fields, wanted: int) -> Iterator[Document]:
        """The documents of about `wanted` megabytes that are evenly spread over the source, without bad ones. Of what
        can only be read from its start, the beginnings. All of a small source, and of one without a size."""
        step = sum(max(0, file.size) for file in self.files) // (SPAN * wanted) * SPAN
        if step <= SPAN:
            yield from _first(self.documents(fields, []), ENDED)
            return
        base = 0
        for number, file in enumerate(self.files):
            points = range(-base % step, max(0, file.size), step)
            starts = Counter(kind_of(file).near(file, point) for point in points)
            if None in starts:
                starts = Counter({0: len(points)})
            for start, times in starts.items():  # a group of rows may be larger than a step
                yield from _first(self.documents(fields, [number, start or 0]), times * SPAN)
            base += max(0, file.size)


def _first(documents: Iterator[tuple[Document | Bad, Place]], characters: int) -> Iterator[Document]:
    """The first good documents, until they have so many characters."""
    for document, _ in documents:
        if isinstance(document, Document):
            yield document
            characters -= len(document.text)
            if characters <= 0:
                return


def split_files(files: list[File], val_fraction: float, stream: bool = False) -> FileSplit:
    """Chooses the held-out text files in the order of a hash of their names.

    It takes as many as fit into val_fraction of the bytes, or the smallest if none fits. A single text is cut by its
    characters; stream: that would read all of it, so its megabytes are held out by their hashes.
    """
    texts = [i for i, f in enumerate(files) if kind_of(f).one_document and f.size > 0]
    if val_fraction == 0 or not texts:
        return FileSplit(files)
    if len(files) == 1:
        return FileSplit(files, cut=None if stream else cut_at(files[0], val_fraction), pieces=stream)
    if len(texts) == 1:  # the other documents are rows of files, held out one by one
        return FileSplit(files)
    budget = val_fraction * sum(files[i].size for i in texts)
    chosen = set()
    for i in sorted(texts, key=lambda i: document_hash(files[i].name)):
        if files[i].size <= budget:
            chosen.add(i)
            budget -= files[i].size
    smallest = min(texts, key=lambda i: (files[i].size, document_hash(files[i].name)))
    return FileSplit(files, frozenset(chosen or {smallest}))


def document_hash(name: str, offset: int = 0) -> int:
    """64 bits that decide a document's split. They depend on the file's name and the document's place in it."""
    digest = hashlib.blake2b(f"{offset} {name}".encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def cut_at(file: File, val_fraction: float) -> int:
    """The byte where character int(n (1 - val_fraction)) of a UTF-8 text of n characters begins."""

    def character_starts() -> Iterator[np.ndarray]:
        with file.open() as f:
            while chunk := f.read(1 << 22):
                yield (np.frombuffer(chunk, np.uint8) & 0xC0) != 0x80

    try:
        total = sum(int(starts.sum()) for starts in character_starts())
    except OSError:
        return max(0, file.size)  # its reader will report the error
    wanted, at = int(total * (1 - val_fraction)), 0
    for starts in character_starts():
        here = int(starts.sum())
        if here > wanted:
            return at + int(np.flatnonzero(starts)[wanted])
        wanted, at = wanted - here, at + len(starts)
    return at


RACY_NS = 2_000_000_000
SAMPLED = 1 << 16  # bytes at each end of a file that stand for its content


def stat_of(path: Path) -> list[int] | None:
    """The identity of a file that is stored with its hash: size, mtime, ctime (ns), inode. None: it cannot be read."""
    try:
        s = path.stat()
    except OSError:
        return None
    return [s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino]


def sampled_sha256(path: Path) -> str:
    """Hash of a file's size and its two ends: for streams, which begin before anybody has read all of it."""
    with open(path, "rb") as f:
        size = os.fstat(f.fileno()).st_size
        digest = hashlib.sha256(f"{size} ".encode() + f.read(SAMPLED))
        f.seek(max(0, size - SAMPLED))
        digest.update(f.read(SAMPLED))
    return digest.hexdigest()


def remembered(
    paths: Sequence[Path],
    memo: Path,
    compute: Callable[[Path], Any],
    unreadable: Callable[[OSError], Any],
    usable: Callable[[Path, Any], bool] = lambda path, value: True,
) -> list[Any]:
    """compute(path) for each file, in threads. Values of files that are certainly unchanged are taken from `memo`, a
    JSON file, if they are usable."""
    known: dict[str, dict[str, Any]] = {}
    with suppress(OSError, ValueError):
        known = json.loads(memo.read_text("utf-8"))
    before = dict(known)

    def value_of(path: Path) -> Any:
        state, at, entry = stat_of(path), time.time_ns(), known.get(str(path))
        if state is not None and entry is not None and entry["stat"] == state:
            certain = entry["at"] - max(state[1:3]) > RACY_NS
            if certain and usable(path, entry["value"]):
                return entry["value"]
        try:
            value = compute(path)
        except OSError as error:
            return unreadable(error)
        if stat_of(path) != state or state is None:
            raise UserError(f"{path}: changed while being read; run again when it is complete")
        known[str(path)] = {"stat": state, "at": at, "value": value}
        return value

    with ThreadPoolExecutor(cores()) as pool:
        values = list(pool.map(value_of, paths))
    if known != before:
        write_atomically(memo, json.dumps(known))
    return values
