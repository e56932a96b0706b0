"""Reads token files in place (`tokens:PATH`): nanoGPT's and llm.c's .bin, and .npy."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.data.batches import objective_of
from fivefold.data.blocks import BlockHasher, read_digests
from fivefold.data.fingerprint import Memo, remembered
from fivefold.data.sources import nearest
from fivefold.data.tokens import DataSet, Shard, Tokens
from fivefold.errors import UserError
from fivefold.files import BROKEN, cache_folder, open_file, writable, write_atomically
from fivefold.recipe import Recipe

# llm.c: 256 int32 (magic, version, number of tokens, ...), then the ids.
LLMC_HEADER = 256 * 4
LLMC_DTYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
NPY_DTYPES = ("uint16", "uint32", "int32", "int64")
LARGEST_VOCABULARY = 1 << 31  # a larger id is a negative int32, or the file holds no tokens
CHUNK = 1 << 24  # ids scanned at once
CHANGED = "The file was changed after it was scanned, or the disk is failing. Restore it, and run again"
VALIDATION = re.compile(r"(^|[_.-])val(id|idation)?([_.-]|$)")  # val.bin, fineweb_val_000000.bin


def open_files(recipe: Recipe, tell: Callable[[str, int, int | None], None]) -> DataSet:
    """The token files of a recipe, memory-mapped in place.

    Files named val (val.bin, x_val_000.bin) are the validation set. Without one, the last val_fraction of the
    tokens is. Every id is scanned once, and the result is remembered. The vocabulary is model.vocab_size, or one
    more than the highest id. Training on masked tokens adds a last id for the mask, which the files must not hold.
    Raises UserError for truncated files and for ids beyond the vocabulary.
    """
    began, spec = time.perf_counter(), recipe.data.source
    shards = [read_header(p, recipe.data.token_dtype) for p in find_files(spec)]
    highest, digests, shards = _scan(shards, recipe, tell)
    reserved = 1 if objective_of(recipe) == "mlm" else 0
    needed = min(max([1, *highest]) + 1 + reserved, LARGEST_VOCABULARY)
    vocab_size = recipe.model.vocab_size or needed
    for shard, top in zip(shards, highest, strict=True):
        if top >= vocab_size - reserved:
            _refuse(shard, vocab_size, reserved)
    train, val = split(shards, recipe.data.val_fraction)
    info = {
        "source": spec,
        "fingerprint": hashlib.sha256("".join(digests).encode()).hexdigest()[:32],
        "folder": str(shards[0].path.parent),
        "cached": True,
        "files": len(shards),
        "tokens": {"train": len(train), "val": len(val) if val else 0},
        "skipped": {"bad": 0, "empty": sum(s.tokens == 0 for s in shards)},
        "seconds": round(time.perf_counter() - began, 3),
    }
    return DataSet(train, val, None, vocab_size, vocab_size - 1 if reserved else None, info)


def find_files(spec: str) -> list[Path]:
    """The token files of `tokens:PATH`, sorted. PATH is a file, a folder with .bin and .npy files, or a glob."""
    given = spec.removeprefix("tokens:")
    if not given:
        raise UserError("data.source = 'tokens:': the path is missing; write tokens:PATH")
    pattern = Path(os.path.expanduser(given))
    if pattern.is_dir():
        paths = [p for p in pattern.iterdir() if p.suffix in (".bin", ".npy")]
    elif pattern.is_file():
        paths = [pattern]
    else:
        paths = [p for p in map(Path, glob.glob(str(pattern), recursive=True)) if p.is_file()]
    if not paths:
        raise UserError(f"data.source: no token file (.bin, .npy) at {spec!r}; {nearest(pattern)}")
    for path in paths:
        if path.suffix not in (".bin", ".npy"):
            raise UserError(f"data.source: {path}: token files end in .bin (nanoGPT, llm.c) or .npy")
    return sorted(path.absolute() for path in paths)


def read_header(path: Path, dtype: str) -> Shard:
    """Where the ids lie in a file, and their dtype. `dtype` is that of a .bin without a header."""
    try:
        with open_file(path):  # a pipe would block
            return _npy(path) if path.suffix == ".npy" else _bin(path, dtype)
    except OSError as error:
        raise UserError(f"data.source: {path}: cannot be read: {error.strerror}") from None


def _bin(path: Path, dtype: str) -> Shard:
    size = path.stat().st_size
    with open(path, "rb") as f:
        head = np.frombuffer(f.read(12), "<i4") if size >= LLMC_HEADER else np.zeros(3, "<i4")
    known = LLMC_DTYPES.get((int(head[0]), int(head[1])))
    if known is not None:
        count, there = int(head[2]), (size - LLMC_HEADER) // np.dtype(known).itemsize
        if not 0 <= count <= there:
            raise UserError(
                f"data.source: {path}: truncated: its header says {count:,} tokens, but the file ends after "
                f"{there:,} (byte {size:,})"
            )
        return Shard(path, known, LLMC_HEADER, count)
    if head[0] in {magic for magic, _ in LLMC_DTYPES}:
        raise UserError(f"data.source: {path}: unknown version {head[1]} of an llm.c file")
    item = np.dtype(dtype).itemsize
    if size % item:
        raise UserError(
            f"data.source: {path}: truncated: {size:,} bytes are not a whole number of {dtype} tokens of {item} "
            f"bytes (the last begins at byte {size - size % item:,})"
        )
    return Shard(path, f"<u{item}", 0, size // item)


def _npy(path: Path) -> Shard:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (
        *BROKEN,
        EOFError,
        MemoryError,
        SyntaxError,
    ) as error:  # it names the fault: magic, header or size
        raise UserError(f"data.source: {path}: not a complete .npy file: {error}") from None
    if array.ndim != 1 or array.dtype.name not in NPY_DTYPES:
        raise UserError(
            f"data.source: {path}: holds {array.dtype} of shape {array.shape}; expected one dim of "
            f"{', '.join(NPY_DTYPES)}"
        )
    assert isinstance(array, np.memmap)
    return Shard(path, array.dtype.str, int(array.offset), len(array))


def _scan(
    shards: list[Shard], recipe: Recipe, tell: Callable[..., None]
) -> tuple[list[int], list[str], list[Shard]]:
    """Highest id and content hash of each file, remembered, and the shards with the digests of their blocks. Ids count
    as unsigned, so a negative one is huge."""
    root = cache_folder(recipe.data.cache) / "data"
    total, done = sum(s.path.stat().st_size for s in shards), 0
    by_path = {s.path: s for s in shards}

    def scan(path: Path) -> list[Any]:
        nonlocal done
        shard, top, digest, hasher = by_path[path], 0, hashlib.sha256(), BlockHasher()
        for chunk in _chunks(shard):
            top = max(top, int(_unsigned(chunk).max()))
            content = np.ascontiguousarray(chunk).view(np.uint8).data
            digest.update(content)
            hasher.update(content)
            done += chunk.nbytes
            tell("scanning tokens", done, total)
        blocks = hasher.digests()
        write_atomically(digests_of(path), blocks)
        return [top, digest.hexdigest(), hashlib.sha256(blocks).hexdigest()]

    def digests_of(path: Path) -> Path:
        return root / f"tokens-{hashlib.sha256(str(path).encode()).hexdigest()[:16]}.digests"

    def known(shard: Shard, value: list[Any]) -> bytes | None:
        size = shard.tokens * np.dtype(shard.dtype).itemsize
        return read_digests(digests_of(shard.path), size, value[2]) if len(value) > 2 else None

    def unreadable(error: OSError) -> Any:
        raise UserError(f"data.source: {error.filename}: cannot be read: {error.strerror}")

    where = hashlib.sha256(f"{recipe.data.token_dtype} {shards[0].path.parent}".encode()).hexdigest()
    with writable(root):
        memo = Memo(root / f"tokens-{where[:16]}.json")
        paths = [s.path for s in shards]
        found = remembered(paths, memo, scan, unreadable)
        lacking = [s.path for s, value in zip(shards, found, strict=True) if known(s, value) is None]
        if lacking:  # of an older version, or removed
            memo.forget(lacking)
            found = remembered(paths, memo, scan, unreadable)
    checked = [
        s._replace(digests=known(s, value), advice=CHANGED) for s, value in zip(shards, found, strict=True)
    ]
    return [value[0] for value in found], [value[1] for value in found], checked


def _chunks(shard: Shard):
    if shard.tokens:
        ids = np.memmap(shard.path, shard.dtype, "r", shard.offset, (shard.tokens,)).view(np.ndarray)
        for start in range(0, shard.tokens, CHUNK):
            yield ids[start : start + CHUNK]


def _unsigned(ids: np.ndarray) -> np.ndarray:
    return ids.view(ids.dtype.str.replace("i", "u"))


def _refuse(shard: Shard, vocab_size: int, reserved: int) -> None:
    """Raises an error that locates the first id beyond the vocabulary."""
    start = 0
    for chunk in _chunks(shard):
        beyond = np.flatnonzero(_unsigned(chunk) >= vocab_size - reserved)
        if len(beyond):
            at, item = start + int(beyond[0]), np.dtype(shard.dtype).itemsize
            ids = Tokens([shard])[:CHUNK]
            hint = ""
            if shard.dtype == "<u2" and len(ids) > 2 and (ids[1::2] < 16).mean() > 0.99:
                hint = "; every other id is nearly 0, so the file may hold uint32: set data.token_dtype"
            last = " (the last id is reserved for the mask token)" if reserved else ""
            raise UserError(
                f"data.source: {shard.path}: token {at:,} (byte {shard.offset + at * item:,}) has id "
                f"{int(chunk[beyond[0]]):,}, beyond the vocabulary of {vocab_size:,}{last}; "
                f"set model.vocab_size to at least the number of ids{hint}"
            )
        start += len(chunk)
    raise AssertionError("the scan found an id that the file does not hold")


def split(shards: list[Shard], val_fraction: float) -> tuple[Tokens, Tokens | None]:
    held_out = [s for s in shards if VALIDATION.search(s.path.stem)]
    training = [s for s in shards if s not in held_out]
    if held_out and training:
        return Tokens(training), Tokens(held_out) if val_fraction > 0 else None
    total = sum(s.tokens for s in shards)
    if val_fraction == 0:
        return Tokens(shards), None
    cut = int(total * (1 - val_fraction))
    return Tokens(shards, 0, cut), Tokens(shards, cut)
