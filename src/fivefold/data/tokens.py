"""Tokens on disk: shards of raw little-endian ids with a manifest, read as one long array.

A byte that a disk or a cable has changed is not trained on. A file is hashed in blocks of 64 KiB while it is written or
scanned. A process compares each block when it first reads from it, which costs about 40 microseconds per block and
nothing later. So no cache is too large for it. What changes in memory after that is not noticed.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from fivefold.data.kinds.kind import Shard
from fivefold.data.kinds.token_files import DocIndex
from fivefold.data.tokenizer import load_tokenizer
from fivefold.errors import UserError
from fivefold.files import BROKEN, flush, parse_json, remove, sha256, stream, stream_on, write_atomically

BLOCK = 1 << 16
DIGEST = 8  # bytes of a block's SHA-256 that are kept
Tell = Callable[[str, int, int | None], None]  # (stage, bytes done, total bytes if known)
OPEN_MAPS = 256  # each mapping holds a file descriptor; a process has 1024 by default


class Tokens:
    """Memory-mapped token ids of any number of shards. len() counts tokens, and [a:b] reads across shards.

    start, stop: the window of the shards' tokens that this object shows [default: all]. flags: one byte per token of
    the same window; None: every token is COUNTED.
    """

    def __init__(
        self, shards: Sequence[Shard], start: int = 0, stop: int | None = None, flags: Tokens | None = None
    ):
        self.flags = flags
        self.shards = [s for s in shards if s.tokens]
        self._starts = [0, *accumulate(shard.tokens for shard in self.shards)]
        self._start = start
        self._stop = self._starts[-1] if stop is None else stop
        assert 0 <= self._start <= self._stop <= self._starts[-1]
        self._maps: OrderedDict[int, np.ndarray] = OrderedDict()
        self._compared: dict[int, np.ndarray] = {}  # which blocks of each shard
        self._indexes: dict[int, DocIndex] = {}

    @property
    def indexed(self) -> bool:
        """True if an index says where documents end, at least in some shards."""
        return any(shard.index for shard in self.shards)

    def ends(self, a: int, b: int, end: int | None) -> np.ndarray:
        """Which of the tokens a .. b are the last of their document: sorted places, int64. end: the id of such a token,
        in shards without an index."""
        ends = [np.empty(0, np.int64)]
        for number, start, stop in self._spans(a, b):
            shard, base = self.shards[number], self._starts[number] - self._start
            if shard.index is not None:
                if number not in self._indexes:
                    self._indexes[number] = DocIndex(shard.index[0])
                ends.append(self._indexes[number].ends(start, stop) + base)
            elif end is not None:
                ends.append(np.flatnonzero(self._map(number)[start:stop] == end) + start + base)
        return np.concatenate(ends)

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, window: slice) -> np.ndarray:
        """Ids [a:b] in the shards' dtype. The array is a view of the mapping if one shard holds all of them."""
        a, b, step = window.indices(len(self))
        assert step == 1, "tokens are read in order"
        pieces = list(self._pieces(a, b))
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.uint16), *pieces])

    def identity(self) -> str:
        """A hash that says which tokens these are: by their digests, or where they lie if those are not known."""
        shards = [
            (s.digests or str(s.path), s.dtype, s.offset, s.tokens, *(s.index or ())[1:]) for s in self.shards
        ]
        flags = None if self.flags is None else self.flags.identity()
        return hashlib.sha256(repr((shards, self._start, self._stop, flags)).encode()).hexdigest()

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """tokens[s : s + length] for each s of starts (R,), as int64 of shape (R, length)."""
        out_RT = np.empty((len(starts), length), np.int64)
        for row, start in zip(out_RT, starts.tolist(), strict=True):
            at = 0
            for piece in self._pieces(start, start + length):
                row[at : at + len(piece)] = piece
                at += len(piece)
            assert at == length
        return out_RT

    def _pieces(self, a: int, b: int):
        for shard, start, stop in self._spans(a, b):
            ids = self._map(shard)
            if self.shards[shard].digests is not None:
                self._compare(shard, ids, start, stop)
            yield ids[start:stop]

    def _spans(self, a: int, b: int) -> Iterator[tuple[int, int, int]]:
        """(shard, first token in it, token behind the last) of tokens a .. b."""
        a, b = a + self._start, b + self._start
        shard = bisect_right(self._starts, a) - 1
        while a < b:
            first = self._starts[shard]
            stop = min(b, self._starts[shard + 1])
            yield shard, a - first, stop - first
            a, shard = stop, shard + 1

    def _compare(self, index: int, ids: np.ndarray, start: int, stop: int) -> None:
        """Compares what is about to be read with the hashes of its blocks. Raises UserError: it has changed since they
        were made."""
        shard, content = self.shards[index], ids.view(np.uint8)
        assert shard.digests is not None
        compared = self._compared.setdefault(index, np.zeros(len(shard.digests) // DIGEST, bool))
        first, last = start * ids.itemsize // BLOCK, -(-stop * ids.itemsize // BLOCK)
        for block in (np.flatnonzero(~compared[first:last]) + first).tolist():
            here = content[block * BLOCK : (block + 1) * BLOCK]
            known = shard.digests[block * DIGEST : (block + 1) * DIGEST]
            if hashlib.sha256(here.data).digest()[:DIGEST] != known:
                start, stop = block * BLOCK, block * BLOCK + len(here)
                with suppress(OSError):
                    if shard.advice == ADVICE:  # a folder of the cache, which the next run makes again
                        write_atomically(shard.path.parent / DAMAGED, f"{shard.path.name} {start} {stop}\n")
                raise UserError(
                    f"data: {shard.path} is damaged: bytes {shard.offset + start:,} to {shard.offset + stop:,} are not "
                    f"what was written. {shard.advice}"
                )
            compared[block] = True

    def _map(self, index: int) -> np.ndarray:
        mapped = self._maps.get(index)
        if mapped is None:
            shard = self.shards[index]
            mapped = np.memmap(shard.path, shard.dtype, "r", shard.offset, (shard.tokens,)).view(np.ndarray)
            self._maps[index] = mapped
            if len(self._maps) > OPEN_MAPS:
                self._maps.popitem(last=False)
        return mapped


COUNTED = 1
"""A bit of a token's flags: the loss counts where it is predicted."""
ENDS = 2
"""A bit of a token's flags: it is the last of its document. Conversations hold end tokens inside, too."""
FORMAT = 2  # raise it when the same source and settings would give other shards
SHARD_TOKENS = 1 << 27
NAMES = ("train", "val")
FLAGS = "flags-"
"""Beginning of the names of files that hold flags: flags-train-00000.bin, beside train-00000.bin."""
MANIFEST, JOURNAL = "manifest.json", "journal.json"
DAMAGED = "damaged"
"""A file beside shards in which a process has found another content than was written."""
ADVICE = "The disk may be failing. Run again: the text is tokenized anew"


class BlockHasher:
    """Hashes a file, piece by piece as it is written."""

    def __init__(self) -> None:
        self._whole, self._current, self._missing = bytearray(), hashlib.sha256(), BLOCK

    def update(self, content: memoryview) -> None:
        """content: bytes, flat."""
        while len(content):
            taken = content[: self._missing]
            self._current.update(taken)
            self._missing -= len(taken)
            content = content[len(taken) :]
            if not self._missing:
                self._whole += self._current.digest()[:DIGEST]
                self._current, self._missing = hashlib.sha256(), BLOCK

    def digests(self) -> bytes:
        """Those of all blocks, one after the other."""
        rest = self._current.digest()[:DIGEST] if self._missing < BLOCK else b""
        return bytes(self._whole) + rest


def read_digests(path: Path, size: int, sha256: str) -> bytes | None:
    """The digests of a file of `size` bytes. None if they are missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) != -(-size // BLOCK) * DIGEST or hashlib.sha256(content).hexdigest() != sha256:
        return None
    return content


class ShardWriter:
    """Writes one split as train-00000.bin, train-00001.bin, ... with SHARD_TOKENS each (fewer in the last).

    count: tokens that are there already; what has been written behind them is cut off.
    """

    def __init__(self, folder: Path, name: str, dtype: str, shard_tokens: int = SHARD_TOKENS, count: int = 0):
        self.folder, self.name, self.dtype, self.shard_tokens = folder, name, dtype, shard_tokens
        self.count, self.item = count, np.dtype(dtype).itemsize
        self._file: IO[bytes] | None = None
        self._hasher = BlockHasher()
        if rest := count % shard_tokens * self.item:
            path = self.path(count // shard_tokens)
            with open(path, "rb") as file:
                while rest and (content := file.read(min(rest, 1 << 20))):
                    self._hasher.update(memoryview(content))
                    rest -= len(content)
            self._file = stream_on(path, count % shard_tokens * self.item)

    def write(self, ids: np.ndarray) -> None:
        while len(ids):
            if self._file is None:
                self._file = stream(self.path(self.count // self.shard_tokens))
            taken = ids[: self.shard_tokens - self.count % self.shard_tokens]
            content = np.ascontiguousarray(taken, self.dtype).view(np.uint8).data
            self._file.write(content)
            self._hasher.update(content)
            self.count += len(taken)
            ids = ids[len(taken) :]
            if self.count % self.shard_tokens == 0:
                self.close()

    def flush(self) -> None:
        """Forces what was written to the disk."""
        if self._file is not None:
            self._file.flush()
            flush(self.path((self.count - 1) // self.shard_tokens))

    def close(self) -> None:
        """Ends the last shard."""
        if self._file is not None:
            self.flush()
            self._file.close()
            self._file = None
            path = self.path((self.count - 1) // self.shard_tokens)
            write_atomically(_digests_of(path), self._hasher.digests())
            self._hasher = BlockHasher()

    def entries(self) -> list[dict[str, Any]]:
        """File, tokens and the hash of the digests of each shard, for the manifest."""
        entries = []
        for index in range(-(-self.count // self.shard_tokens)):
            tokens = min(self.shard_tokens, self.count - index * self.shard_tokens)
            digests = hashlib.sha256(_digests_of(self.path(index)).read_bytes()).hexdigest()
            entries.append({"file": self.path(index).name, "tokens": tokens, "digests": digests})
        return entries

    def path(self, index: int) -> Path:
        return self.folder / f"{self.name}-{index:05d}.bin"


def _digests_of(shard: Path) -> Path:
    return shard.with_suffix(".digests")


class Commit(NamedTuple):
    """A border between groups of documents. train, val: tokens before it. place: where the next group begins."""

    train: int = 0
    val: int = 0
    place: tuple[int, ...] = ()

    @classmethod
    def of(cls, value: Any) -> Commit:
        """Raises one of `files.BROKEN` if it is none."""
        train, val, place = value
        if not all(type(n) is int and n >= 0 for n in (train, val, *place)):
            raise ValueError("not whole numbers")
        return cls(train, val, tuple(place))


class Journal(NamedTuple):
    """What a folder of shards holds while it grows: training tokens first .. count, and the first `val` tokens of
    validation.

    shard: tokens of a training shard. total: number of training tokens, once the end was seen. full: validation gets no
    more. at: the border behind the last whole group; tokens between it and `count` are there, too. summary: counts of
    the documents before it. rule: threshold and cut of the split.
    """

    dtype: str
    shard: int = SHARD_TOKENS
    first: int = 0
    count: int = 0
    val: int = 0
    full: bool = False
    total: int | None = None
    at: Commit = Commit()
    summary: dict[str, Any] | None = None
    rule: tuple[int, float] = (0, 0.0)

    @property
    def item(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def read(self) -> int:
        """Bytes of text that are tokenized."""
        return sum(self.summary["bytes"]) if self.summary else 0

    def has(self, low: int, need: int) -> bool:
        """Are tokens low .. need there, as far as there are so many?"""
        return self.first <= low and self.count >= (need if self.total is None else min(need, self.total))

    def write(self, folder: Path) -> None:
        write_atomically(folder / JOURNAL, json.dumps(self._asdict()))


def read_journal(folder: Path) -> Journal | None:
    """None: there is nothing yet."""
    try:
        journal = Journal(**parse_json((folder / JOURNAL).read_bytes()))
        return journal._replace(at=Commit.of(journal.at))
    except (OSError, *BROKEN):
        return None


def continued(folder: Path, prefixes: Sequence[str] = ("",)) -> Journal | None:
    """The journal of an interrupted folder, from which shards that it does not name are removed. None: nothing is
    there, or not all it names. prefixes: of the shards' names."""
    journal, names = read_journal(folder), set[str]()
    if journal is not None:
        numbers = range(journal.first // journal.shard, -(-journal.count // journal.shard))
        names = {f"train-{i:05d}" for i in numbers}
        names |= {f"val-{i:05d}" for i in range(-(-journal.val // SHARD_TOKENS))}
        names = {prefix + name for prefix in prefixes for name in names}
    for path in folder.glob("*-*.*"):
        if path.suffix in (".bin", ".digests") and path.stem not in names:
            remove(path)
    return journal if all((folder / f"{name}.bin").exists() for name in names) else None


def growing_shards(folder: Path, split: str, journal: Journal, count: int, size: int) -> list[Shard]:
    """The shards of the first `count` tokens of a growing folder, whose digests are not known. size: of a shard."""
    return [
        Shard(folder / f"{split}-{i:05d}.bin", journal.dtype, 0, min(size, count - start))
        for i, start in enumerate(range(0, count, size))
    ]


SEAL = "tokenizer.sha256"
"""A file beside a tokenizer in the cache: a hash of what was written."""


def seal_tokenizer(folder: Path) -> None:
    """Notes the tokenizer of a folder, as `has_tokenizer` compares it."""
    write_atomically(folder / SEAL, _of_tokenizer(folder))


def has_tokenizer(folder: Path) -> bool:
    """True if a folder of the cache has the tokenizer that was written. One of an older version, without a note, is
    taken if it can be loaded, and noted."""
    try:
        if (folder / SEAL).exists():
            return (folder / SEAL).read_text("utf-8") == _of_tokenizer(folder)
        load_tokenizer(folder / "tokenizer.json")
        with suppress(OSError):  # of a cache that is read-only
            seal_tokenizer(folder)
    except (OSError, ValueError, UserError):
        return False
    return True


def _of_tokenizer(folder: Path) -> str:
    return " ".join(sha256(folder / name) for name in ("tokenizer.json", "tokenizer_config.json"))


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a complete folder, or None if it is missing, or a shard or its digests are missing or have the
    wrong size, or the tokenizer or the folder was found to be damaged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        item = np.dtype(manifest["dtype"]).itemsize
        flags = manifest.get("flags", {})
        for entry in [e for kind in (manifest["shards"], flags) for split in kind.values() for e in split]:
            size = entry["tokens"] * (1 if entry["file"].startswith(FLAGS) else item)
            if (folder / entry["file"]).stat().st_size != size:
                return None
            if read_digests(_digests_of(folder / entry["file"]), size, entry["digests"]) is None:
                return None
        if (folder / DAMAGED).exists() or not has_tokenizer(folder):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest if manifest["format"] == FORMAT else None


def open_tokens(folder: Path, manifest: dict[str, Any], split: str) -> Tokens:
    flags = Tokens(_shards(folder, manifest["flags"][split], "|u1")) if "flags" in manifest else None
    return Tokens(_shards(folder, manifest["shards"][split], manifest["dtype"]), flags=flags)


def _shards(folder: Path, entries: list[dict[str, Any]], dtype: str) -> list[Shard]:
    item, shards = np.dtype(dtype).itemsize, []
    for entry in entries:
        path = folder / entry["file"]
        digests = read_digests(_digests_of(path), entry["tokens"] * item, entry["digests"])
        shards.append(Shard(path, dtype, 0, entry["tokens"], digests, ADVICE))
    return shards
