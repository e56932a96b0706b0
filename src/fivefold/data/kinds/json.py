"""JSON: an object per line (.jsonl); the objects of an array, or those that stand one behind the other (.json)."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from fivefold.data.kinds.kind import (
    ENDED,
    LONGEST_LINE,
    SPAN,
    Bad,
    Documents,
    Fields,
    File,
    Kind,
    Rows,
    document_of,
    unreadable,
)
from fivefold.errors import UserError
from fivefold.files import refuse_depth

_DECODER = json.JSONDecoder()


class JsonLines(Kind):
    name = "jsonl"
    suffixes = (".jsonl",)

    def read(self, number: int, file: File, start: int, fields: Fields, cut: int | None = None) -> Documents:
        at = start
        try:
            with file.open(start) as f:
                for row, behind in objects(f, start):
                    if isinstance(row, str):
                        yield Bad(number, at, row), behind
                    elif row is not None:
                        yield document_of(number, at, row, fields), behind
                    at = behind
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


def objects(
    f: BinaryIO, at: int = 0, most: int | None = None
) -> Iterator[tuple[dict[str, Any] | str | None, int]]:
    """The object of each line from byte `at` on, None of a blank line, or why a line has none; and the place behind it.
    most: bytes of a line."""
    most = most or LONGEST_LINE
    while line := f.readline(most):
        begin, at = at, at + len(line)
        if len(line) == most and not line.endswith(b"\n"):
            at += _skip_line(f)
            yield f"a line of more than {most >> 20} MiB", at
            continue
        row: Any = None
        try:
            if line.strip():
                refuse_depth(line)
                row = json.loads(line.rstrip(b"\r\n").decode("utf-8-sig" if begin == 0 else "utf-8"))
                row = row if isinstance(row, dict) else f"a JSON {type(row).__name__}; expected an object"
        except UnicodeDecodeError as error:
            row = f"not UTF-8: byte 0x{line[error.start]:02x} at {error.start} in the line"
        except json.JSONDecodeError as error:
            row = f"not JSON: {error.msg} (character {error.pos})"
        except RecursionError:
            row = "not JSON: nested too deeply"
        except ValueError:  # Python reads no numbers of more than 4300 digits
            row = "not JSON: a number is too long"
        yield row, at


class Json(Rows):
    name = "json"
    suffixes = (".json",)

    def rows(self, file: File, fields: Fields, done: int) -> Iterator[tuple[int, dict[str, Any] | str]]:
        number = 0
        try:
            with file.open() as f:
                text = _Characters(f)
                at = text.past_blanks(0)
                array = text.at(at) == "["
                at += array
                while True:
                    at = text.past_blanks(at)
                    if array and number and text.at(at) == ",":
                        at = text.past_blanks(at + 1)
                    if text.at(at) in ("", "]" if array else ""):
                        break
                    value, at = text.decoded(at)
                    kind = type(value).__name__
                    yield number, value if isinstance(value, dict) else f"a JSON {kind}; expected an object"
                    number, at = number + 1, text.forget(at)
                if array and text.at(at) != "]":
                    yield number, "not JSON: the array does not end"
        except UserError:  # it is a ValueError, and no fault of the file
            raise
        except RecursionError:
            yield number, "not JSON: nested too deeply"
        except ValueError as error:
            yield number, f"not JSON: {error.msg if isinstance(error, json.JSONDecodeError) else error}"


class _Characters:
    """The beginning of what is left of a file, as characters."""

    def __init__(self, f: BinaryIO):
        self.f, self.text, self.whole = f, "", False
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._wrong: UnicodeDecodeError | None = None  # raised when what is before it was read

    def _more(self, least: int) -> None:
        if self._wrong is not None:
            raise self._wrong
        chunk = self.f.read(max(SPAN, least))
        self.whole = not chunk
        try:
            self.text += self._decoder.decode(chunk, final=self.whole)
        except UnicodeDecodeError as error:
            self._wrong, self.whole = error, False
            self.text += error.object[: error.start].decode("utf-8-sig")

    def at(self, at: int) -> str:
        while at >= len(self.text) and not self.whole:
            self._more(0)
        return self.text[at : at + 1]

    def past_blanks(self, at: int) -> int:
        while (here := self.at(at)) and here in " \t\r\n":
            at = self.forget(at + 1)  # there may be gigabytes of them
        return at

    def forget(self, at: int) -> int:
        """Leaves out what was read, now and then."""
        if at < len(self.text) // 2:
            return at
        self.text = self.text[at:]
        return 0

    def decoded(self, at: int) -> tuple[Any, int]:
        """The JSON value at `at`, and what is behind it. Reads on while it may be cut off."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, at)
                if end < len(self.text) or self.whole:
                    return value, end
            except json.JSONDecodeError as error:
                if self.whole or not (
                    error.pos > len(self.text) - 16 or error.msg.startswith("Unterminated")
                ):
                    raise
            if len(self.text) - at > LONGEST_LINE:
                raise ValueError(f"an object of more than {LONGEST_LINE >> 20} MiB")
            self._more(len(self.text) - at)
