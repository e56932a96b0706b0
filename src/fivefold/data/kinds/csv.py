"""Tables as text: the first line names the columns, and a quoted field may hold line breaks."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any, BinaryIO

from fivefold.data.kinds.kind import LONGEST_LINE, Fields, File, Rows
from fivefold.errors import UserError


class Csv(Rows):
    """A line break may stand in quotes that began anywhere before, so a file is read from its start."""

    name = "csv"
    suffixes = (".csv",)

    def rows(self, file: File, fields: Fields, done: int) -> Iterator[tuple[int, dict[str, Any] | str]]:
        number = 0
        try:
            with file.open() as f:
                csv.field_size_limit(LONGEST_LINE)  # of the process, 128 KiB by default
                for row in csv.DictReader(_lines(f), strict=True):
                    yield number, row
                    number += 1
        except UserError:  # it is a ValueError, and no fault of the file
            raise
        except OSError as error:
            yield number, f"cannot be read: {error.strerror or error}"
        except UnicodeDecodeError as error:
            yield number, f"not UTF-8: byte 0x{error.object[error.start]:02x} ({error.reason})"
        except csv.Error as error:
            yield number, f"not CSV: {error}"


def _lines(f: BinaryIO) -> Iterator[str]:
    """The lines of a file with their ends, which a quoted field keeps. Each is decoded alone, so faults have a row."""
    encoding = "utf-8-sig"
    while line := f.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            raise csv.Error(f"a line of more than {LONGEST_LINE >> 20} MiB")
        yield line.decode(encoding)
        encoding = "utf-8"
