"""Reads files that can only be read from their start: compressed ones, those at an address, arrays of JSON.

One process reads such a file. It hands its content to the workers in blocks that end with a line, or in rows. A text is
cut exactly where `documents.py` cuts one of which any part can be read, so a.txt.gz gives the tokens of a.txt.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from fivefold.data.conversations import MESSAGES
from fivefold.data.remote import open_remote
from fivefold.data.sources import BROKEN_PARQUET, File
from fivefold.errors import UserError
from fivefold.files import open_file

SPAN = 1 << 20  # bytes
LINE_SEARCH = 1 << 17  # bytes searched for a line break; without one, a text is cut between characters
LONGEST_LINE = 1 << 28  # bytes of a .jsonl line or of an object in .json, which are held in memory as a whole
ZSTD_WINDOW = 1 << 27  # bytes that decompressing may need; those of `zstd --long=27`
ZSTD_READ = 1 << 12  # compressed bytes taken at once; they become 128 MiB at most
ROWS = 64  # of a .parquet decoded at once, so that a row group of gigabytes never is


class Block(NamedTuple):
    """Whole lines of a .jsonl, or a piece of a text. place: its first byte, uncompressed. begins, ends: as in
    `documents.Document`. reason: why it cannot be read."""

    file: int
    place: int
    split: int
    begins: bool
    ends: bool
    reason: str
    content: bytes


class Row(NamedTuple):
    """A row of a table. value: its fields, or why it cannot be read."""

    file: int
    number: int
    value: dict[str, Any] | str


def opened(file: File) -> BinaryIO:
    """A file's content, uncompressed.

    Raises:
        UserError: an extra is missing, or the network failed.
        OSError: it cannot be opened. Reading raises it, too, where the compression is broken.
    """
    raw: Any = open_remote(file.url) if file.url else open_file(file.path)
    if not file.packed:
        return raw
    try:
        unpacked = gzip.GzipFile(fileobj=raw) if file.packed == ".gz" else _zstd(raw, file.where)
    except BaseException:
        raw.close()
        raise
    return io.BufferedReader(_Unpacked(raw, unpacked), 1 << 18)


def _zstd(raw: BinaryIO, where: str) -> Any:
    try:
        import zstandard
    except ImportError:
        raise UserError(
            f"data.source: {where} needs the extra `zstd`: pip install 'fivefold[zstd]'"
        ) from None
    return _Frames(raw, zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW))


class _Frames:
    """The content of a .zst. The library's own reader takes a file that was cut off for a shorter one."""

    def __init__(self, raw: BinaryIO, library: Any):
        self._raw, self._library = raw, library
        self._frame: Any = None  # the one that has begun
        self._ready: deque[memoryview] = deque()

    def read(self, size: int) -> bytes | memoryview:
        while not self._ready:
            packed = self._raw.read(ZSTD_READ)
            if not packed:
                if self._frame is not None:
                    raise EOFError("the file ends within a frame")
                return b""
            while packed:
                frame = self._frame = self._frame or self._library.decompressobj()
                if content := frame.decompress(packed):
                    self._ready.append(memoryview(content))
                packed = frame.unused_data if frame.eof else b""
                self._frame = None if frame.eof else frame
        content = self._ready.popleft()
        if len(content) > size:
            self._ready.appendleft(content[size:])
        return content[:size]


class _Unpacked(io.RawIOBase):
    """What is broken in a compressed file is an OSError."""

    def __init__(self, raw: BinaryIO, unpacked: Any):
        self._raw, self._unpacked = raw, unpacked

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            content = self._unpacked.read(len(buffer))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise OSError(f"cannot be decompressed: {error}") from None
        except Exception as error:
            if type(error).__module__.startswith("zstandard"):
                raise OSError(f"cannot be decompressed: {error}") from None
            raise
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._raw.close()
        super().close()


def line_border(window: bytes) -> int:
    """Where a text may be cut: its first byte behind a line break, or else the next character's. window: the text from
    the byte before a nominal cut on, LINE_SEARCH bytes at most."""
    line = window.find(b"\n")
    if line >= 0:
        return line + 1
    at = 1
    while at < min(len(window), 5) and window[at] & 0xC0 == 0x80:  # a continuation byte of UTF-8
        at += 1
    return at


def block_tasks(
    number: int, file: File, split: int, cut: int | None, at: int, separated: bool
) -> Iterator[tuple[list[Block], int]]:
    """The blocks of a file from byte `at` on, and the byte behind each.

    split: where its documents go; cut: the byte from which on a text is validation instead. separated: an end token
    follows a text.
    """
    try:
        with opened(file) as f:
            _skip(f, at)
            cutter = _Texts(f, at, cut) if file.kind == "text" else _Lines(f, at)
            while (found := cutter.next()) is not None:
                content, reason = found
                begins, ends = at == 0 or at == cut, cutter.ended
                goes = split if cut is None else int(at >= cut)
                yield [Block(number, at, goes, begins, ends and separated, reason, content)], cutter.at
                at = cutter.at
    except OSError as error:
        reason = error.strerror or str(error)
        reason = reason if "decompressed" in reason else f"cannot be read: {reason}"
        yield [Block(number, at, split, False, False, reason, b"")], 1 << 62


def _skip(f: BinaryIO, count: int) -> None:
    if count and f.seekable():
        f.seek(count)
        return
    while count and (chunk := f.read(min(count, SPAN))):
        count -= len(chunk)


class _Texts:
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
            size = before + line_border(self._buffer[before : have - self.at][:LINE_SEARCH])
            self.ended = self.at + size == high
        content, self._buffer = self._buffer[:size], self._buffer[size:]
        self.at += size
        return content, ""


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
                while (chunk := self.f.readline(SPAN)) and not chunk.endswith(b"\n"):
                    end += len(chunk)
                end += len(chunk)
                content, reason = b"", f"a line of more than {LONGEST_LINE >> 20} MiB"
            self.at += end
            return (content, reason) if end else None
        self._rest = content[end:]
        self.at += end
        return content[:end], ""


def rows(number: int, file: File, text_key: str, chat: bool, done: int) -> Iterator[Row]:
    """The rows of a .json or .parquet file from row `done` on. chat: they may be conversations."""
    found = _json_rows(file) if file.kind == "json" else _parquet_rows(file, text_key, chat, done)
    for row, value in found:
        if row >= done:
            yield Row(number, row, value)


def row_tasks(found: Iterator[Row], text_key: str, chat: bool) -> Iterator[tuple[list[Row], int]]:
    """Rows gathered into tasks of about SPAN characters, and the number of the row behind each."""
    task: list[Row] = []
    size = 0
    for row in found:
        value = row.value
        if isinstance(value, dict):
            value, characters = _needed(value, text_key, chat)
            size += characters
        task.append(row._replace(value=value))
        size += 1
        if size >= SPAN:
            yield task, row.number + 1
            task, size = [], 0
    if task:
        yield task, task[-1].number + 1


def _needed(row: dict[str, Any], text_key: str, chat: bool) -> tuple[dict[str, Any], int]:
    """What of a row goes to a worker, and its characters: the text or the messages, or else names for the error."""
    text = row.get(text_key)
    if chat and row.get(MESSAGES) is not None:
        return {MESSAGES: row[MESSAGES]}, len(str(row[MESSAGES]))
    if isinstance(text, str):
        return {text_key: text}, len(text)
    return dict.fromkeys(map(str, row)) | _small(text_key, row), 0


def _small(key: str, row: dict[str, Any]) -> dict[str, Any]:
    value = row.get(key)
    return {key: value} if isinstance(value, int | float | bool) else {}


_DECODER = json.JSONDecoder()


def _json_rows(file: File) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """The objects of a JSON array, or those that stand one behind the other."""
    number = 0
    try:
        with opened(file) as f:
            text = _Text(f)
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
        yield number, f"cannot be read: {error}"
    except (ValueError, RecursionError) as error:
        yield number, f"not JSON: {_reason(error)}"


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


class _Text:
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


def _parquet_rows(
    file: File, text_key: str, chat: bool, done: int
) -> Iterator[tuple[int, dict[str, Any] | str]]:
    import pyarrow.parquet

    row = 0
    try:
        with opened(file) as f:
            parquet: Any = pyarrow.parquet.ParquetFile(f)
            columns = parquet.schema_arrow.names
            wanted = wanted_columns(columns, text_key, chat)
            if not wanted:
                yield row, no_column(text_key, columns)
                return
            for group in range(parquet.num_row_groups):
                count = parquet.metadata.row_group(group).num_rows
                if row + count <= done:
                    row += count
                    continue
                for batch in parquet.iter_batches(ROWS, [group], wanted, use_threads=False):
                    for found in rows_of(batch):
                        yield row, found
                        row += 1
    except UserError:
        raise
    except (OSError, *BROKEN_PARQUET) as error:
        yield row, f"cannot be read: {error}"


def wanted_columns(columns: list[str], text_key: str, chat: bool) -> list[str]:
    """The columns of a .parquet that are read."""
    return [name for name in (text_key, *((MESSAGES,) if chat else ())) if name in columns]


def rows_of(batch: Any) -> Iterator[dict[str, Any] | str]:
    """The rows of a batch of a .parquet, or why one cannot be read: a text may be no UTF-8. A text among conversations
    has no messages."""
    try:
        found = batch.to_pylist()
    except ValueError as error:
        if batch.num_rows == 1:
            yield f"cannot be read: {error}"
            return
        for row in range(batch.num_rows):
            yield from rows_of(batch.slice(row, 1))
        return
    for row in found:
        yield {name: value for name, value in row.items() if name != MESSAGES or value is not None}


def no_column(text_key: str, columns: list[str]) -> str:
    """Why a .parquet has no text."""
    tokens = "; for its column input_ids write tokens:PATH" if "input_ids" in columns else ""
    return f"no column {text_key!r} (columns: {', '.join(columns[:10])}); set data.text_key{tokens}"
