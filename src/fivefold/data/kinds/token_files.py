"""Files of ids: .bin of nanoGPT and llm.c, .npy, .parquet with a column `input_ids`, and indexed data sets of
Megatron-LM (megatron/core/datasets/indexed_dataset.py): ids in NAME.bin, an index in NAME.idx.

The index is little-endian: a magic word, the version, a code of the ids' dtype, the number of sequences n and of
borders m; n lengths (int32), the first byte of each sequence (n int64), and the borders of documents as numbers of
sequences (m int64; the first is 0, the last n). Files with images have n modes behind (int8). Ids are written with the
dtype that Megatron-LM chooses.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.data.kinds.kind import Shard, TokenKind
from fivefold.errors import UserError
from fivefold.files import BROKEN, flush, stream

# llm.c: 256 int32 (magic, version, number of tokens, ...), then the ids.
LLMC_HEADER = 256 * 4
LLMC_DTYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
NPY_MAGIC = b"\x93NUMPY"
NPY_DTYPES = ("uint16", "uint32", "int32", "int64")
LARGEST_VOCABULARY = 1 << 31  # a larger id is a negative int32, or the file holds no tokens
COLUMN = "input_ids"
MAGIC, VERSION = b"MMIDIDX\0\0", 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
FLOATS = {6: "float64", 7: "float32"}
SMALL_VOCABULARY = 65500  # below it Megatron-LM writes uint16, else int32
LONGEST = 1 << 30  # tokens of a sequence that we write; a longer document is several
CHUNK = 1 << 22


class Bin(TokenKind):
    """nanoGPT's and llm.c's: little-endian ids, in llm.c behind a header."""

    name, suffix = "bin", ".bin"

    def shard(self, path: Path, dtype: str) -> Shard:
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
        return Shard(path, f"<u{item}", 0, size // item, assumed=True)


class Npy(TokenKind):
    name, suffix = "npy", ".npy"

    def shard(self, path: Path, dtype: str) -> Shard:
        with open(path, "rb") as f:
            if f.read(len(NPY_MAGIC)) != NPY_MAGIC:
                raise UserError(
                    f"data.source: {path}: no .npy file: it begins without numpy's header. Raw ids, as OLMo-core and "
                    "dolma write them, are read from files named .bin (data.token_dtype says their size)"
                )
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (*BROKEN, EOFError, MemoryError, SyntaxError) as error:  # it names the fault
            raise UserError(f"data.source: {path}: not a complete .npy file: {error}") from None
        if array.ndim != 1 or array.dtype.name not in NPY_DTYPES:
            raise UserError(
                f"data.source: {path}: holds {array.dtype} of shape {array.shape}; expected one dim of "
                f"{', '.join(NPY_DTYPES)}"
            )
        return Shard(path, array.dtype.str, int(array.offset), len(array))


class InputIds(TokenKind):
    """A row is a document. Ids are compressed, so they are copied."""

    name, suffix = COLUMN, ".parquet"
    copied = True

    def shard(self, path: Path, dtype: str) -> Shard:
        """Its number of ids only, where an empty row counts as one."""
        metadata = _opened(path).metadata
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        columns = [group.column(i) for group in groups for i in range(group.num_columns)]
        count = sum(c.num_values for c in columns if c.path_in_schema.split(".")[0] == COLUMN)
        return Shard(path, "<u4", 0, count)

    def pieces(self, path: Path, end: int | None) -> Iterator[np.ndarray]:
        row = 0
        for batch in _opened(path).iter_batches(1024, columns=[COLUMN], use_threads=False):
            rows: list[np.ndarray] = []
            for cell in batch.column(0):
                ids = cell.values  # None: the row has no list
                ids = None if ids is None or ids.null_count else ids.to_numpy(zero_copy_only=False)
                if ids is None or (len(ids) and not 0 <= ids.min() <= ids.max() < LARGEST_VOCABULARY):
                    raise UserError(
                        f"data.source: {path}: row {row}: {COLUMN} must hold ids from 0 to "
                        f"{LARGEST_VOCABULARY - 1:,}"
                    )
                if end is not None and (not len(ids) or ids[-1] != end):
                    ids = np.append(ids, end)
                rows.append(ids.astype("<u4"))
                row += 1
            if rows:
                yield np.concatenate(rows)


def _opened(path: Path) -> Any:
    """Raises UserError if a .parquet is broken, or has no column of ids."""
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
    if not any(is_kind(kind) for is_kind in lists) or not pyarrow.types.is_integer(kind.value_type):
        raise UserError(
            f"data.source: {path}: the column {COLUMN!r} has {kind}; expected lists of whole numbers"
        )
    return parquet


class DocIndex:
    """Where documents end. It is searched where it lies, so a border costs no memory. dtype: of the ids.

    Raises:
        UserError: it is damaged, or not that of a text.
        OSError: it cannot be read.
    """

    def __init__(self, index: Path):
        self.index, size = index, index.stat().st_size
        with open(index, "rb") as file:
            head = file.read(HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise self._wrong("not an index of Megatron-LM, which begins with MMIDIDX")
        _, version, code, n, m = HEADER.unpack(head)
        if version != VERSION:
            raise self._wrong(f"unknown version {version}; known: {VERSION}")
        if code not in DTYPES:
            raise self._wrong(f"its ids have dtype {FLOATS.get(code, code)}, which is none of ids")
        expected = HEADER.size + 12 * n + 8 * m
        if size != expected:
            images = "; files with images are not supported" if size == expected + n else ""
            raise self._wrong(
                f"{size:,} bytes, but {n:,} sequences and {m:,} borders are {expected:,}{images}"
            )
        self.dtype = DTYPES[code]
        self._item = np.dtype(self.dtype).itemsize
        # Sequences have a length and a first byte. Documents are numbers of sequences.
        parts = (("<i4", n), ("<i8", n), ("<i8", m))
        offset, maps = HEADER.size, []
        for dtype, count in parts:
            maps.append(np.memmap(index, dtype, "r", offset, (count,)) if count else np.empty(0, dtype))
            offset += count * np.dtype(dtype).itemsize
        self._lengths, self._begins, self._documents = maps

    def _wrong(self, what: str) -> UserError:
        return UserError(f"data.source: {self.index}: {what}")

    def ends(self, a: int, b: int) -> np.ndarray:
        """The tokens of a .. b that are the last of a document: int64, sorted."""
        borders = range(1, len(self._documents))  # the first one is the beginning
        low, high = (bisect_right(borders, at, key=self._behind) + 1 for at in (a, b))
        last = np.asarray(self._documents[low:high]) - 1  # the last sequence of each document
        return np.unique(self._begins[last] // self._item + self._lengths[last]) - 1

    def _behind(self, border: int) -> int:
        """The token behind a document."""
        last = int(self._documents[border]) - 1
        return int(self._begins[last]) // self._item + int(self._lengths[last]) if last >= 0 else 0

    def count(self) -> int:
        """The number of ids, which lie one behind the other. Raises UserError: they do not, or the borders of documents
        are damaged."""
        total, last = 0, 0
        for start in range(0, len(self._lengths), CHUNK):
            lengths, begins = (part[start : start + CHUNK] for part in (self._lengths, self._begins))
            ends = total + np.cumsum(lengths, dtype=np.int64)
            if (lengths < 0).any() or not np.array_equal(begins, (ends - lengths) * self._item):
                raise self._wrong("its sequences do not lie one behind the other in the .bin")
            total = int(ends[-1])
        in_order = len(self._documents) == 0 or self._documents[0] == 0
        for start in range(0, len(self._documents), CHUNK):
            borders = self._documents[start : start + CHUNK]
            in_order = bool(in_order and borders[0] >= last and (borders[:-1] <= borders[1:]).all())
            last = int(borders[-1])
        if len(self._documents) and not (in_order and last == len(self._lengths)):
            raise self._wrong("its borders of documents do not go from 0 to the number of sequences")
        return total


class Megatron(TokenKind):
    name, suffix = "megatron", ".bin"

    def has(self, path: Path) -> bool:
        return super().has(path) and path.with_suffix(".idx").is_file()

    def shard(self, path: Path, dtype: str) -> Shard:
        index = DocIndex(path.with_suffix(".idx"))
        count, there = index.count(), path.stat().st_size // np.dtype(index.dtype).itemsize
        if there < count:
            raise UserError(
                f"data.source: {path}: truncated: its index says {count:,} ids, but the file ends after {there:,}"
            )
        return Shard(path, index.dtype, 0, count, index=(index.index, ""))


def write_indexed(path: Path, tokens: Any, vocab_size: int, end_id: int | None) -> None:
    """Writes `Tokens` as NAME.bin and then NAME.idx. A document ends with an end token, or where the index of the
    tokens says it. Neither: all is one document."""
    dtype = "<u2" if vocab_size < SMALL_VOCABULARY else "<i4"
    lengths: list[Any] = []
    borders: list[Any] = [np.zeros(1, np.int64)]
    open_, sequences = 0, 0  # ids since the last border, and sequences before it
    with stream(path) as file:
        for start in range(0, len(tokens), CHUNK):
            ids = tokens[start : start + CHUNK]
            file.write(np.ascontiguousarray(ids, dtype).view(np.uint8).data)
            ends = tokens.ends(start, start + len(ids), end_id) - start + 1
            here = np.diff(ends, prepend=-open_)
            if len(ends):
                lengths.append(here)
                borders.append(sequences + np.arange(1, len(ends) + 1))
                sequences += len(ends)
            open_ = len(ids) - int(ends[-1]) if len(ends) else open_ + len(ids)
            if open_ >= LONGEST:
                lengths.append(np.array([open_]))
                sequences, open_ = sequences + 1, 0
    if open_:
        lengths.append(np.array([open_]))
        sequences += 1
    if int(borders[-1][-1]) != sequences:
        borders.append(np.array([sequences]))
    all_lengths = np.concatenate([np.zeros(0, np.int64), *lengths])
    all_borders = np.concatenate(borders)
    code = next(code for code, known in DTYPES.items() if known == dtype)
    flush(path)
    with stream(path.with_suffix(".idx")) as file:
        file.write(HEADER.pack(MAGIC, VERSION, code, sequences, len(all_borders)))
        file.write(all_lengths.astype("<i4").tobytes())
        begins = (np.cumsum(all_lengths) - all_lengths) * np.dtype(dtype).itemsize
        file.write(begins.astype("<i8").tobytes())
        file.write(all_borders.astype("<i8").tobytes())
    flush(path.with_suffix(".idx"))
