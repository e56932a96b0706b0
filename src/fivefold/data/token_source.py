"""Sources of ids (`tokens:PATH`), read in place: scanned once, and split.

What a kind of such files looks like is in `kinds/`.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.data.batches import objective_of
from fivefold.data.kinds import TOKEN_KINDS
from fivefold.data.kinds.kind import File, Shard
from fivefold.data.kinds.token_files import LARGEST_VOCABULARY
from fivefold.data.packing import DataSet
from fivefold.data.sources import Source, remembered, sha256_file, stat_of
from fivefold.data.tokens import BlockHasher, Tell, Tokens, read_digests
from fivefold.errors import UserError
from fivefold.files import (
    cache_folder,
    flush,
    open_file,
    own_word,
    remove,
    rename,
    stream,
    writable,
    write_atomically,
)
from fivefold.recipe import Recipe

CHUNK = 1 << 24  # ids scanned at once
CHANGED = "The file was changed after it was scanned, or the disk is failing. Restore it, and run again"
VALIDATION = re.compile(r"(^|[_.-])val(id|idation)?([_.-]|$)")  # val.bin, fineweb_val_000000.bin


def open_files(source: Source, recipe: Recipe, tell: Tell) -> DataSet:
    """The token files of a recipe, memory-mapped in place.

    Files named val (val.bin, x_val_000.bin) are the validation set. Without one, the last val_fraction of the
    tokens is. Every id is scanned once, and the result is remembered. The vocabulary is model.vocab_size, or one
    more than the highest id. Training on masked tokens adds a last id for the mask, which the files must not hold.
    Raises UserError for truncated files and for ids beyond the vocabulary.
    """
    began, root = time.perf_counter(), cache_folder(recipe.data.cache) / "data"
    with writable(root):
        shards = [_in_place(file, recipe, root, tell) for file in source.files]
        highest, hashes, shards = _scan(shards, recipe.data.token_dtype, root, tell)
        if recipe.data.document_masks or recipe.data.packing == "best_fit":
            shards = _with_hashed_indexes(shards, root)
            hashes += [shard.index[1] for shard in shards if shard.index]
    reserved = 1 if objective_of(recipe) == "mlm" else 0
    needed = min(max([1, *highest]) + 1 + reserved, LARGEST_VOCABULARY)
    vocab_size = recipe.model.vocab_size or needed
    for shard, top in zip(shards, highest, strict=True):
        if top >= vocab_size - reserved:
            _refuse(shard, vocab_size, reserved)
    train, val = split(shards, recipe.data.val_fraction)
    info = {
        "source": source.spec,
        "fingerprint": hashlib.sha256("".join(hashes).encode()).hexdigest()[:32],
        "folder": str(shards[0].path.parent),
        "cached": True,
        "files": len(shards),
        "tokens": {"train": len(train), "val": len(val) if val else 0},
        "skipped": {"bad": 0, "empty": sum(s.tokens == 0 for s in shards)},
        "seconds": round(time.perf_counter() - began, 3),
    }
    return DataSet.of_one(train, val, None, vocab_size, vocab_size - 1 if reserved else None, info)


def headers(source: Source, recipe: Recipe) -> list[Shard]:
    """Where the ids of a source lie, by its files' beginnings."""
    return [_header(file.path, file.kind, recipe.data.token_dtype) for file in source.files]


def _header(path: Path, kind: str, dtype: str) -> Shard:
    try:
        with open_file(path):  # a pipe would block
            return TOKEN_KINDS[kind].shard(path, dtype)
    except OSError as error:
        raise UserError(f"data.source: {path}: cannot be read: {error.strerror}") from None


def _in_place(file: File, recipe: Recipe, root: Path, tell: Tell) -> Shard:
    """A file's ids, or their copy in the cache."""
    kind, end = TOKEN_KINDS[file.kind], recipe.data.end_token
    shard = _header(file.path, file.kind, recipe.data.token_dtype)
    if not kind.copied:
        return shard
    facts = f"{file.path} {stat_of(file.path)} {end}"
    copy = root / f"{file.path.stem}-{_short(facts)}.bin"
    if not copy.is_file():
        temporary, done = copy.with_suffix(f".{own_word()}"), 0
        try:
            with stream(temporary) as target:
                for ids in kind.pieces(file.path, end):
                    target.write(ids.data)
                    done += ids.nbytes
                    tell(f"copying {kind.name}", done, 4 * shard.tokens)
            flush(temporary)
            rename(temporary, copy)
        finally:
            remove(temporary)
    return shard._replace(path=copy, tokens=copy.stat().st_size // 4)


def _with_hashed_indexes(shards: list[Shard], root: Path) -> list[Shard]:
    """The shards with the hashes of their indexes."""
    paths = [shard.index[0] for shard in shards if shard.index]
    memo = root / f"indexes-{_short(str(shards[0].path.parent))}.json"
    hashes = dict(zip(paths, remembered(paths, memo, sha256_file, _unreadable), strict=True))
    return [s._replace(index=s.index and (s.index[0], hashes[s.index[0]])) for s in shards]


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _unreadable(error: OSError) -> Any:
    raise UserError(f"data.source: {error.filename}: cannot be read: {error.strerror}")


def _scan(
    shards: list[Shard], dtype: str, root: Path, tell: Tell
) -> tuple[list[int], list[str], list[Shard]]:
    """Highest id and content hash of each file, remembered, and the shards with the digests of their blocks. Ids count
    as unsigned, so a negative one is huge."""
    total, done = sum(s.path.stat().st_size for s in shards), 0
    by_path = {s.path: s for s in shards}

    def scan(path: Path) -> list[Any]:
        nonlocal done
        top, digest, hasher = 0, hashlib.sha256(), BlockHasher()
        for chunk in _chunks(by_path[path]):
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
        return root / f"tokens-{_short(str(path))}.digests"

    def blocks_of(path: Path, value: list[Any]) -> bytes | None:
        """None: somebody has removed them."""
        shard = by_path[path]
        return read_digests(digests_of(path), shard.tokens * np.dtype(shard.dtype).itemsize, value[2])

    memo = root / f"tokens-{_short(f'{dtype} {shards[0].path.parent}')}.json"
    values = remembered(list(by_path), memo, scan, _unreadable, lambda p, v: blocks_of(p, v) is not None)
    scanned = [
        shard._replace(digests=blocks_of(path, value), advice=CHANGED)
        for (path, shard), value in zip(by_path.items(), values, strict=True)
    ]
    return [value[0] for value in values], [value[1] for value in values], scanned


def _chunks(shard: Shard) -> Iterator[np.ndarray]:
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


def require_one_split(source: Source) -> None:
    """Raises UserError if the files of a validation set are some for validation and others for training: nobody can say
    which are meant."""
    paths = [file.path for file in source.files if source.ids]
    held_out = [path for path in paths if VALIDATION.search(path.stem)]
    if held_out and len(held_out) < len(paths):
        other = next(path for path in paths if path not in held_out)
        raise UserError(
            f"data.source = {source.spec!r}: all of a validation set is validated on, and {other.name} does not "
            f"look like it, beside {held_out[0].name}. Nearest valid: {f'tokens:{held_out[0]}'!r}"
        )


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
