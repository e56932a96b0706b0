"""Parquet: rows of a table."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from fivefold.data.chat import MESSAGES
from fivefold.data.kinds.kind import Fields, File, Rows, unreadable
from fivefold.errors import UserError

ROWS = 64  # decoded at once, so that a row group of gigabytes never is


class Parquet(Rows):
    name = "parquet"
    suffixes = (".parquet",)
    packs = False  # it has compressions of its own

    def rows(self, file: File, fields: Fields, done: int) -> Iterator[tuple[int, dict[str, Any] | str]]:
        with file.open() as f:
            yield from _rows(file.path if file.plain else f, fields, done)

    def behind(self, file: File, byte: int) -> int | None:
        """The first row of the group that has the byte, as if all rows had as many bytes."""
        try:
            *starts, rows = [0, *accumulate(_sizes(_open(file.path)))]
        except _broken():
            return None  # its reader will report it
        return max(start for start in starts if start * file.size <= byte * rows) if len(starts) > 1 else None


def _rows(file: Path | BinaryIO, fields: Fields, done: int) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """The rows without groups that end before row `done`. A fault ends its group only."""
    try:
        parquet = _open(file)
        columns = parquet.schema_arrow.names
        sizes = _sizes(parquet)
    except _broken() as error:
        yield 0, _reason(error)
        return
    wanted = [name for name in (fields.text, *((MESSAGES,) if fields.chat else ())) if name in columns]
    if not wanted:
        tokens = "; for its column input_ids write tokens:PATH" if "input_ids" in columns else ""
        names = ", ".join(columns[:10])
        yield 0, f"no column {fields.text!r} (columns: {names}); set data.text_key{tokens}"
        return
    for group, stop in enumerate(accumulate(sizes)):
        row = stop - sizes[group]
        try:
            for batch in (
                parquet.iter_batches(ROWS, [group], wanted, use_threads=False) if stop > done else ()
            ):
                for value in _values(batch):
                    yield row, value
                    row += 1
        except _broken() as error:
            yield row, _reason(error)


def _sizes(parquet: Any) -> list[int]:
    """The rows of each group."""
    return [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]


def _reason(error: Exception) -> str:
    if isinstance(error, UserError):  # it is a ValueError, and no fault of the file
        raise error
    return unreadable(error) if isinstance(error, OSError) else f"a broken parquet file: {error}"


def _values(batch: Any) -> Iterator[dict[str, Any] | str]:
    """The rows of a batch of a .parquet, or why one cannot be read: a text may be no UTF-8. A text among conversations
    has no messages."""
    try:
        rows = batch.to_pylist()
    except ValueError as error:
        if batch.num_rows == 1:
            yield f"cannot be read: {error}"
            return
        for row in range(batch.num_rows):
            yield from _values(batch.slice(row, 1))
        return
    for fields in rows:
        yield {name: value for name, value in fields.items() if name != MESSAGES or value is not None}


def _broken() -> tuple[type[Exception], ...]:
    """What pyarrow raises for a file that is broken, or has what it does not read."""
    import pyarrow

    return OSError, ValueError, pyarrow.ArrowException


def _open(file: Path | BinaryIO) -> Any:
    import pyarrow.parquet  # takes 0.1 s to import, and few sources need it

    return pyarrow.parquet.ParquetFile(file)
