"""Files of ids: .bin of nanoGPT and llm.c, .npy, and .parquet with a column `input_ids`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.data.kinds.kind import Shard, TokenKind
from fivefold.errors import UserError
from fivefold.files import BROKEN

# llm.c: 256 int32 (magic, version, number of tokens, ...), then the ids.
LLMC_HEADER = 256 * 4
LLMC_DTYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
NPY_DTYPES = ("uint16", "uint32", "int32", "int64")
LARGEST_VOCABULARY = 1 << 31  # a larger id is a negative int32, or the file holds no tokens
COLUMN = "input_ids"


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
        return Shard(path, f"<u{item}", 0, size // item)


class Npy(TokenKind):
    name, suffix = "npy", ".npy"

    def shard(self, path: Path, dtype: str) -> Shard:
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (
            *BROKEN,
            EOFError,
            MemoryError,
            SyntaxError,
        ) as error:  # names the fault: magic, header or size
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
        return Shard(
            path, "<u4", 0, sum(c.num_values for c in columns if c.path_in_schema.split(".")[0] == COLUMN)
        )

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
