"""Plain text: a file is one document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from fivefold.data.kinds.kind import (
    ENDED,
    SPAN,
    TRAIN,
    VAL,
    Bad,
    Document,
    Documents,
    Fields,
    File,
    Kind,
    unreadable,
)

LINE_SEARCH = 1 << 17  # bytes searched for a line break; without one, a text is cut between characters


class Text(Kind):
    name = "text"
    suffixes = (".txt", ".md", ".py")
    one_document = True

    def read(self, number: int, file: File, start: int, fields: Fields, cut: int | None = None) -> Documents:
        at = start
        try:
            with file.open(start) as f:
                for raw, ends in _pieces(f, start, cut):
                    begin, at = at, at + len(raw)
                    begins, split = begin in (0, cut), TRAIN if cut is None or begin < cut else VAL
                    try:
                        text = raw.decode("utf-8")
                    except UnicodeDecodeError as error:
                        reason = f"not UTF-8: byte 0x{raw[error.start]:02x} ({error.reason})"
                        whole = begins and ends
                        yield Bad(number, begin + error.start, reason), at if whole else begin
                        if whole:
                            continue
                        text = ""  # keep the rest of a long text, with its beginning and its end
                    yield Document(number, begin, text, split, begins, ends), at
        except OSError as error:
            yield Bad(number, at, unreadable(error)), ENDED

    def behind(self, file: File, byte: int) -> int | None:
        with file.open(byte - 1) as f:
            return byte - 1 + _line_border(f.read(LINE_SEARCH))


def _line_border(window: bytes) -> int:
    """Where a text may be cut: its first byte behind a line break, or else the next character's. window: the text from
    the byte before a nominal cut on, LINE_SEARCH bytes at most."""
    line = window.find(b"\n")
    if line >= 0:
        return line + 1
    at = 1
    while at < min(len(window), 5) and window[at] & 0xC0 == 0x80:  # a continuation byte of UTF-8
        at += 1
    return at


def _pieces(f: BinaryIO, at: int, cut: int | None) -> Iterator[tuple[bytes, bool]]:
    """A text from byte `at` on, in pieces of about SPAN bytes; True for one that ends its document. They are cut near
    the multiples of SPAN, counted from the beginning of their document, so a cut depends on the content alone."""
    buffer, ends = b"", True
    while True:
        behind = cut is not None and at >= cut
        low, high = (cut or 0, None) if behind else (0, cut)
        nominal = low + ((at - low) // SPAN + 1) * SPAN
        wanted = nominal - at + LINE_SEARCH + 1  # more than a piece can have: less means the end of the text
        while len(buffer) < wanted and (chunk := f.read(wanted - len(buffer))):
            buffer += chunk
        have = at + len(buffer) if high is None else min(high, at + len(buffer))
        if have == at and ends:
            return
        size, ends = have - at, have <= nominal
        if not ends:
            before = nominal - 1 - at
            size = before + _line_border(buffer[before : have - at][:LINE_SEARCH])
            ends = at + size == high or size == len(buffer) < wanted
        yield buffer[:size], ends
        buffer, at = buffer[size:], at + size
