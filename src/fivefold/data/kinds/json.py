"""JSON: the objects of an array, or those that stand one behind the other."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from fivefold.data.kinds.kind import LONGEST_LINE, SPAN, Fields, File, Rows, unreadable
from fivefold.errors import UserError

_DECODER = json.JSONDecoder()


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
        except OSError as error:
            yield number, unreadable(error)
        except (ValueError, RecursionError) as error:
            yield number, f"not JSON: {_reason(error)}"


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


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
