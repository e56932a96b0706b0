"""JSON lines: a document per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import BinaryIO

from fivefold.data.kinds.kind import (
    ENDED,
    LONGEST_LINE,
    SPAN,
    Bad,
    Document,
    Fields,
    File,
    Kind,
    document_of,
    unreadable,
)


class JsonLines(Kind):
    name = "jsonl"
    suffixes = (".jsonl",)

    def read(
        self, number: int, file: File, start: int, fields: Fields, cut: int | None = None
    ) -> Iterator[tuple[Document | Bad, int]]:
        at = start
        try:
            with file.open(start) as f:
                while line := f.readline(LONGEST_LINE):
                    begin, at = at, at + len(line)
                    if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                        at += _skip_line(f)
                        yield Bad(number, begin, f"a line of more than {LONGEST_LINE >> 20} MiB"), at
                    elif line.strip():
                        yield _document(number, begin, line, fields), at
        except OSError as error:
            yield Bad(number, at, unreadable(error)), ENDED

    def behind(self, file: File, byte: int) -> int | None:
        with file.open(byte - 1) as f:  # a line that begins at this byte is found, too
            return byte - 1 + _skip_line(f)

    def place(self, file: File, bad: Bad) -> str:
        if file.url or bad.reason.startswith("cannot be"):
            return super().place(file, bad)
        with file.open() as f:  # count lines only for the document that is shown
            line, left = 1, bad.place
            while left and (chunk := f.read(min(1 << 20, left))):
                line, left = line + chunk.count(b"\n"), left - len(chunk)
        return f"line {line} ({super().place(file, bad)})"


def _skip_line(f: BinaryIO) -> int:
    """Goes behind the end of the line. Returns the bytes that were left of it."""
    skipped = 0
    while chunk := f.readline(SPAN):
        skipped += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return skipped


def _document(file: int, at: int, line: bytes, fields: Fields) -> Document | Bad:
    try:
        value = json.loads(line.rstrip(b"\r\n").decode("utf-8-sig" if at == 0 else "utf-8"))
    except UnicodeDecodeError as error:
        return Bad(file, at, f"not UTF-8: byte 0x{line[error.start]:02x} at {error.start} in the line")
    except json.JSONDecodeError as error:
        return Bad(file, at, f"not JSON: {error.msg} (character {error.pos})")
    except RecursionError:
        return Bad(file, at, "not JSON: nested too deeply")
    except ValueError:  # Python reads no numbers of more than 4300 digits
        return Bad(file, at, "not JSON: a number is too long")
    if not isinstance(value, dict):
        return Bad(
            file, at, f"a JSON {type(value).__name__}; expected an object with the field {fields.text!r}"
        )
    return document_of(file, at, value, fields)
