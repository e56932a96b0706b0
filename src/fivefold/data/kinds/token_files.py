"""Reads token files in place (`tokens:PATH`): .bin of nanoGPT, llm.c and Megatron-LM, and .npy.

The column `input_ids` of a .parquet is copied to the cache first, because it is compressed.
"""

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
from fivefold.data.kinds import megatron
from fivefold.data.packing import DataSet
from fivefold.data.sources import Memo, nearest, remembered, sha256_file, stat_of
from fivefold.data.tokens import BlockHasher, Shard, Tokens, read_digests
from fivefold.errors import UserError
from fivefold.files import (
    BROKEN,
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

PREFIX = "tokens:"
# llm.c: 256 int32 (magic, version, number of tokens, ...), then the ids.
KINDS = (".bin", ".npy", ".parquet")
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
    shards = []
    for path in find_files(spec):
        if path.suffix == ".parquet":
            shards.append(read_header(_copied(path, recipe, tell), "uint32"))
        else:
            shards.append(read_header(path, recipe.data.token_dtype))
    highest, digests, shards = _scan(shards, recipe, tell)
    if recipe.data.document_masks or recipe.data.packing == "best_fit":
        shards = _indexed(shards, recipe)
        digests += [shard.index[1] for shard in shards if shard.index]
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


def _indexed(shards: list[Shard], recipe: Recipe) -> list[Shard]:
    """The shards with the indexes that lie beside them."""
    paths = [path for shard in shards if (path := megatron.index_of(shard.path)).is_file()]
    root = cache_folder(recipe.data.cache) / "data"
    with writable(root):
        memo = Memo(
            root / f"indexes-{hashlib.sha256(str(shards[0].path.parent).encode()).hexdigest()[:16]}.json"
        )
        hashes = remembered(paths, memo, sha256_file, _unreadable)
    known = dict(zip(paths, hashes, strict=True))
    found = []
    for shard in shards:
        path = megatron.index_of(shard.path)
        found.append(shard._replace(index=(path, known[path])) if path in known else shard)
    return found


def _unreadable(error: OSError) -> Any:
    raise UserError(f"data.source: {error.filename}: cannot be read: {error.strerror}")


def find_files(spec: str) -> list[Path]:
    """The token files of `tokens:PATH`, sorted. PATH is a file, a folder with token files, a glob, or a name without
    .bin, as Megatron-LM has them."""
    given = spec.removeprefix(PREFIX)
    if not given:
        raise UserError("data.source = 'tokens:': the path is missing; write tokens:PATH")
    pattern = Path(os.path.expanduser(given))
    if pattern.is_dir():
        paths = [p for p in pattern.iterdir() if p.suffix in KINDS]
    elif pattern.is_file():
        paths = [pattern]
    elif pattern.with_name(f"{pattern.name}.bin").is_file():
        paths = [pattern.with_name(f"{pattern.name}.bin")]
    else:
        paths = [p for p in map(Path, glob.glob(str(pattern), recursive=True)) if p.is_file()]
    if not paths:
        raise UserError(f"data.source: no token file ({', '.join(KINDS)}) at {spec!r}; {nearest(pattern)}")
    paths = [p for p in paths if p.suffix != ".idx" or not p.with_suffix(".bin").is_file()]
    for path in paths:
        if path.suffix not in KINDS:
            raise UserError(
                f"data.source: {path}: token files end in .bin (nanoGPT, llm.c, Megatron-LM), .npy or .parquet"
            )
    return sorted(path.absolute() for path in paths)


def read_header(path: Path, dtype: str) -> Shard:
    """Where the ids lie in a file, and their dtype. `dtype` is that of a .bin without a header."""
    try:
        with open_file(path):  # a pipe would block
            if path.suffix == ".parquet":  # how many there are
                return Shard(path, "<u4", 0, _input_ids(path)[1])
            return _npy(path) if path.suffix == ".npy" else _bin(path, dtype)
    except OSError as error:
        raise UserError(f"data.source: {path}: cannot be read: {error.strerror}") from None


def _bin(path: Path, dtype: str) -> Shard:
    if megatron.index_of(path).is_file():
        its, count = megatron.read_index(path)
        return Shard(path, its, 0, count)
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


COLUMN = "input_ids"


def _input_ids(path: Path) -> tuple[Any, int]:
    """A .parquet file and the number of its ids.

    Raises:
        UserError: it is broken, or has no column of them.
    """
    import pyarrow.parquet
    import pyarrow.types

    try:
        parquet: Any = pyarrow.parquet.ParquetFile(path)
    except (ValueError, pyarrow.ArrowException) as error:
        raise UserError(f"data.source: {path}: a broken parquet file: {error}") from None
    schema = parquet.schema_arrow
    if COLUMN not in schema.names:
        names = ", ".join(schema.names[:10])
        raise UserError(f"data.source: {path}: no column {COLUMN!r} (columns: {names})")
    kind = schema.field(COLUMN).type
    lists = (pyarrow.types.is_list, pyarrow.types.is_large_list, pyarrow.types.is_fixed_size_list)
    if not any(known(kind) for known in lists) or not pyarrow.types.is_integer(kind.value_type):
        raise UserError(
            f"data.source: {path}: the column {COLUMN!r} has {kind}; expected lists of whole numbers"
        )
    groups = [parquet.metadata.row_group(i) for i in range(parquet.num_row_groups)]
    columns = [group.column(i) for group in groups for i in range(group.num_columns)]
    return parquet, sum(c.num_values for c in columns if c.path_in_schema.split(".")[0] == COLUMN)


def _copied(path: Path, recipe: Recipe, tell: Callable[[str, int, int | None], None]) -> Path:
    """The ids of a .parquet as a file of uint32 in the cache. Behind a row stands data.end_token, if it is set and the
    row does not end with it."""
    root, end = cache_folder(recipe.data.cache) / "data", recipe.data.end_token
    parquet, total = _input_ids(path)
    facts = f"{path} {stat_of(path)} {end}"
    copy = root / f"{path.stem}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.bin"
    if copy.is_file():
        return copy
    with writable(root):
        temporary, done, row = copy.with_suffix(f".{own_word()}"), 0, 0
        try:
            with stream(temporary) as file:
                for batch in parquet.iter_batches(1024, columns=[COLUMN], use_threads=False):
                    for ids in batch.column(0):
                        file.write(_checked(path, row, ids, end))
                        done, row = done + len(ids.values or ()), row + 1
                    tell(f"copying {COLUMN}", 4 * done, 4 * total)
            flush(temporary)
            rename(temporary, copy)
        finally:
            remove(temporary)
    return copy


def _checked(path: Path, row: int, found: Any, end: int | None) -> bytes:
    ids = (
        None
        if found.values is None or found.values.null_count
        else found.values.to_numpy(zero_copy_only=False)
    )
    if ids is None or (len(ids) and not 0 <= ids.min() <= ids.max() < LARGEST_VOCABULARY):
        raise UserError(
            f"data.source: {path}: row {row}: {COLUMN} must hold ids from 0 to {LARGEST_VOCABULARY - 1:,}"
        )
    if end is not None and (not len(ids) or ids[-1] != end):
        ids = np.append(ids, end)
    return ids.astype("<u4").tobytes()


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
        return read_digests(digests_of(shard.path), size, value[2])

    where = hashlib.sha256(f"{recipe.data.token_dtype} {shards[0].path.parent}".encode()).hexdigest()
    with writable(root):
        memo = Memo(root / f"tokens-{where[:16]}.json")
        paths = [s.path for s in shards]
        found = remembered(paths, memo, scan, _unreadable)
        lacking = [s.path for s, value in zip(shards, found, strict=True) if known(s, value) is None]
        if lacking:  # somebody has removed them
            memo.forget(lacking)
            found = remembered(paths, memo, scan, _unreadable)
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


def require_one_split(spec: str) -> None:
    """Raises UserError if the files of a validation set are some for validation and others for training: nobody can say
    which are meant."""
    paths = find_files(spec)
    held_out = [path for path in paths if VALIDATION.search(path.stem)]
    if held_out and len(held_out) < len(paths):
        other = next(path for path in paths if path not in held_out)
        raise UserError(
            f"data.source = {spec!r}: all of a validation set is validated on, and {other.name} does not look like it, "
            f"beside {held_out[0].name}. Nearest valid: {f'tokens:{held_out[0]}'!r}"
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
