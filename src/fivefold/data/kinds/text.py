"""Plain text: a file is one document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from fivefold.data.kinds.kind import LINE_SEARCH, SPAN, Bad, Block, Blocks, Document, Fields, File, FileSpan


class Text(Blocks):
    name = "text"
    suffixes = (".txt", ".md", ".py")
    one_document = True

    def read(self, file: File, span: FileSpan, fields: Fields) -> Iterator[Document | Bad]:
        with open(file.path, "rb") as f:
            start, stop = (_border(f, p, span.low, span.high) for p in (span.start, span.stop))
            f.seek(start)
            raw = f.read(stop - start)
        begins, ends = span.start == span.low, span.stop == span.high
        yield from _piece(span.file, start, raw, span.split, begins, ends and span.end, begins and ends)

    def cutter(self, f: BinaryIO, at: int, cut: int | None) -> _Pieces:
        return _Pieces(f, at, cut)

    def read_block(self, block: Block, fields: Fields) -> Iterator[Document | Bad]:
        number, at, split, begins, ends, _, content = block
        yield from _piece(number, at, content, split, begins, ends, begins and ends)


def _piece(
    file: int, start: int, raw: bytes, split: int, begins: bool, separated: bool, whole: bool
) -> Iterator[Document | Bad]:
    """A piece of a text, perhaps the whole of it."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        at = start + error.start
        yield Bad(file, at, f"not UTF-8: byte 0x{raw[error.start]:02x} ({error.reason})")
        if whole:
            return
        text = ""  # keep the rest of a long text, with its beginning and its end
    yield Document(file, start, text, split, begins, separated)


def _border(f: BinaryIO, position: int, low: int, high: int) -> int:
    """Moves a cut near `position` behind the next line break, or else to the next character.

    low and high, the ends of the document, stay. Every other border depends on the content alone, so the spans on its
    left and right agree.
    """
    if position in (low, high):
        return position
    f.seek(position - 1)
    return position - 1 + _line_border(f.read(min(LINE_SEARCH, high - position + 1)))


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


class _Pieces:
    """Cuts a text from byte `at` on. ended: the last piece was the end of its document."""

    def __init__(self, f: BinaryIO, at: int, cut: int | None):
        self.f, self.at, self.cut, self.ended = f, at, cut, True
        self._buffer = b""

    def next(self) -> tuple[bytes, str] | None:
        behind = self.cut is not None and self.at >= self.cut
        low, high = (self.cut or 0, None) if behind else (0, self.cut)
        nominal = low + ((self.at - low) // SPAN + 1) * SPAN
        wanted = nominal - self.at + LINE_SEARCH
        while len(self._buffer) < wanted and (chunk := self.f.read(wanted - len(self._buffer))):
            self._buffer += chunk
        have = self.at + len(self._buffer) if high is None else min(high, self.at + len(self._buffer))
        if have == self.at and self.ended:
            return None
        self.ended = have <= nominal
        before = nominal - 1 - self.at
        size = have - self.at
        if not self.ended:
            size = before + _line_border(self._buffer[before : have - self.at][:LINE_SEARCH])
            self.ended = self.at + size == high
        content, self._buffer = self._buffer[:size], self._buffer[size:]
        self.at += size
        return content, ""
