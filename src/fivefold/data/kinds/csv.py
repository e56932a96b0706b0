"""Tables as text: the first line names the columns, and a quoted field may hold line breaks."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any, BinaryIO

from fivefold.data.kinds.kind import LONGEST_LINE, Fields, File, Rows

csv.field_size_limit(LONGEST_LINE)  # of the process, 128 KiB by default; `_Lines` bounds whole rows


class Csv(Rows):
    """A line break may stand in quotes that began anywhere before, so a file is read from its start."""

    name = "csv"
    suffixes = (".csv",)

    def rows(self, file: File, fields: Fields, done: int) -> Iterator[tuple[int, dict[str, Any] | str]]:
        number = 0
        with file.open() as f:
            lines = _Lines(f)
            table = csv.reader(lines, strict=True)
            columns, fault = _next(table, lines) or ([], "")
            if fault:
                yield number, f"the names of the columns: {fault}"
                return
            while found := _next(table, lines):
                row, fault = found
                if not fault and len(row) != len(columns):
                    fault = f"a row of {len(row)} fields; the first line names {len(columns)}"
                yield number, fault or dict(zip(columns, row, strict=True))
                number += 1


def _next(table: Iterator[list[str]], lines: _Lines) -> tuple[list[str], str] | None:
    """The next row that is not blank, and what is wrong with it. None: there is none."""
    lines.begin()
    try:
        row = next((row for row in table if row), None)
    except csv.Error as error:
        return [], f"not CSV: {error}"
    return None if row is None else (row, lines.fault)


class _Lines:
    """The lines of a file with their ends, which a quoted field keeps. fault: of those since `begin`."""

    def __init__(self, f: BinaryIO):
        self.f, self.encoding = f, "utf-8-sig"
        self.begin()

    def begin(self) -> None:
        self.left, self.fault = LONGEST_LINE, ""

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self.f.readline(self.left)
        self.left -= len(line)
        if not self.left:
            while line and not line.endswith(b"\n"):
                line = self.f.readline(1 << 20)
            raise csv.Error(f"a row of more than {LONGEST_LINE >> 20} MiB")
        if not line:
            raise StopIteration
        encoding, self.encoding = self.encoding, "utf-8"
        try:
            return line.decode(encoding)
        except UnicodeDecodeError as error:
            self.fault = f"not UTF-8: byte 0x{line[error.start]:02x} ({error.reason})"
            return line.decode(encoding, "replace")
