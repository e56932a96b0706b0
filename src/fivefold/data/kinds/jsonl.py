"""JSON lines: each line is a row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import BinaryIO

from fivefold.data.kinds.kind import (
    LONGEST_LINE,
    SPAN,
    Bad,
    Block,
    Blocks,
    Document,
    Fields,
    File,
    FileSpan,
    document_of,
)


class JsonLines(Blocks):
    name = "jsonl"
    suffixes = (".jsonl",)

    def read(self, file: File, span: FileSpan, fields: Fields) -> Iterator[Document | Bad]:
        with open(file.path, "rb") as f:
            if span.start > 0:  # a line belongs to the span in which it begins
                f.seek(span.start - 1)
                _skip_line(f)
            while (at := f.tell()) < span.stop:
                line = f.readline(LONGEST_LINE)
                if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                    _skip_line(f)
                    yield Bad(span.file, at, f"a line of more than {LONGEST_LINE >> 20} MiB")
                elif line.strip():
                    yield _document(span.file, at, line, fields)

    def cutter(self, f: BinaryIO, at: int, cut: int | None) -> _Lines:
        return _Lines(f, at)

    def read_block(self, block: Block, fields: Fields) -> Iterator[Document | Bad]:
        at = block.place
        for line in block.content.split(b"\n"):
            if line.strip():
                yield _document(block.file, at, line, fields)
            at += len(line) + 1

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


class _Lines:
    """Cuts lines of JSON into blocks of about SPAN bytes."""

    ended = False

    def __init__(self, f: BinaryIO, at: int):
        self.f, self.at, self._rest = f, at, b""

    def next(self) -> tuple[bytes, str] | None:
        content = self._rest + self.f.read(max(1, SPAN - len(self._rest)))
        self._rest = b""
        end = content.rfind(b"\n") + 1
        if not end:
            content += self.f.readline(LONGEST_LINE - len(content))
            end, reason = len(content), ""
            if end >= LONGEST_LINE and not content.endswith(b"\n"):
                end += _skip_line(self.f)
                content, reason = b"", f"a line of more than {LONGEST_LINE >> 20} MiB"
            self.at += end
            return (content, reason) if end else None
        self._rest = content[end:]
        self.at += end
        return content[:end], ""
