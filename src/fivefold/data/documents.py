"""Reads the documents of a span, for worker processes and for the sample that BPE learns from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fivefold.data.conversations import ANSWER, MESSAGES, Message, NotAConversation, messages_of
from fivefold.data.sequential import (
    LINE_SEARCH,
    LONGEST_LINE,
    ROWS,
    Block,
    Row,
    line_border,
    no_column,
    rows_of,
    wanted_columns,
)
from fivefold.data.sources import BROKEN_PARQUET, File
from fivefold.data.tasks import BY_RULE, FileSpan

SKIP = 1 << 20


class Document(NamedTuple):
    """A piece of text.

    place: byte offset in the file (text: of the piece; jsonl: of the line) or row number (parquet, hf). begins: the
    piece is the first of its document. ends: an end token follows it. messages: those of a conversation, whose text is
    only counted and learned from by BPE.
    """

    file: int
    place: int
    text: str
    split: int
    begins: bool = True
    ends: bool = True
    messages: list[Message] | None = None


class Bad(NamedTuple):
    """An unusable document, and the reason."""

    file: int
    place: int
    reason: str


def read_span(
    files: list[File], span: FileSpan, text_key: str, chat: bool = False
) -> Iterator[Document | Bad]:
    """The documents of a span. An unreadable one comes as `Bad`, and reading continues. chat: rows may be
    conversations."""
    file = files[span.file]
    try:
        if file.kind == "text":
            yield from _text(file.path, span)
        elif file.kind == "jsonl":
            yield from _jsonl(file.path, span, text_key, chat)
        else:
            yield from _parquet(file.path, span, text_key, chat)
    except OSError as error:
        yield Bad(span.file, span.start, f"cannot be read: {error.strerror or error}")


def read_block(
    files: list[File], block: Block, text_key: str, chat: bool = False
) -> Iterator[Document | Bad]:
    """The documents of a block."""
    number, at, split, begins, ends, reason, content = block
    if reason:
        yield Bad(number, at, reason)
    elif files[number].kind == "text":
        yield from _piece(number, at, content, split, begins, ends, begins and ends)
    else:
        for line in content.split(b"\n"):
            if line.strip():
                yield _json_document(number, at, line, text_key, chat)
            at += len(line) + 1


def read_row(row: Row, text_key: str, chat: bool = False) -> Document | Bad:
    """A row as a document."""
    if isinstance(row.value, str):
        return Bad(row.file, row.number, row.value)
    return document_of(row.file, row.number, row.value, text_key, chat)


def row_groups(file: File) -> int:
    """Number of row groups of a parquet file; 1 if it is broken (its reader will report it)."""
    try:
        return _open_parquet(file.path).num_row_groups
    except (OSError, *BROKEN_PARQUET):
        return 1


def _text(path: Path, span: FileSpan) -> Iterator[Document | Bad]:
    with open(path, "rb") as f:
        start, stop = (_border(f, p, span.low, span.high) for p in (span.start, span.stop))
        f.seek(start)
        raw = f.read(stop - start)
    begins, ends = span.start == span.low, span.stop == span.high
    yield from _piece(span.file, start, raw, span.split, begins, ends and span.end, begins and ends)


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
    return position - 1 + line_border(f.read(min(LINE_SEARCH, high - position + 1)))


def _jsonl(path: Path, span: FileSpan, text_key: str, chat: bool) -> Iterator[Document | Bad]:
    with open(path, "rb") as f:
        if span.start > 0:  # a line belongs to the span in which it begins
            f.seek(span.start - 1)
            _skip_line(f)
        while (at := f.tell()) < span.stop:
            line = f.readline(LONGEST_LINE)
            if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                _skip_line(f)
                yield Bad(span.file, at, f"a line of more than {LONGEST_LINE >> 20} MiB")
            elif line.strip():
                yield _json_document(span.file, at, line, text_key, chat)


def _skip_line(f: BinaryIO) -> None:
    while (chunk := f.readline(SKIP)) and not chunk.endswith(b"\n"):
        pass


def _json_document(file: int, at: int, line: bytes, text_key: str, chat: bool) -> Document | Bad:
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
        return Bad(file, at, f"a JSON {type(value).__name__}; expected an object with the field {text_key!r}")
    return document_of(file, at, value, text_key, chat)


def document_of(
    file: int, place: int, row: dict[str, Any], text_key: str, chat: bool = False
) -> Document | Bad:
    """The text under text_key of a row, or if it may be a conversation, its messages, as a document."""
    if chat and MESSAGES in row:
        try:
            messages = messages_of(row[MESSAGES])
        except NotAConversation as error:
            return Bad(file, place, str(error))
        if not any(message["role"] == ANSWER for message in messages):
            return Bad(file, place, f"no message has the role '{ANSWER}', so there is nothing to learn")
        return Document(file, place, "\n".join(m["content"] for m in messages), BY_RULE, messages=messages)
    if text_key not in row:
        fields = ", ".join(sorted(map(str, row))[:10])
        if MESSAGES in row:
            return Bad(
                file,
                place,
                f"no field {text_key!r}, but {MESSAGES!r}: a conversation needs data.chat_template",
            )
        return Bad(file, place, f"no field {text_key!r} (fields: {fields or 'none'}); set data.text_key")
    text = row[text_key]
    if not isinstance(text, str):
        return Bad(file, place, f"the field {text_key!r} holds {type(text).__name__}, not text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return Bad(file, place, f"a lone surrogate at character {error.start}: not valid Unicode")
    return Document(file, place, text, BY_RULE)


def _parquet(path: Path, span: FileSpan, text_key: str, chat: bool) -> Iterator[Document | Bad]:
    try:
        parquet = _open_parquet(path)
        columns = parquet.schema_arrow.names
        wanted = wanted_columns(columns, text_key, chat)
        if not wanted:
            yield Bad(span.file, span.start, no_column(text_key, columns))
            return
        sizes = [
            parquet.metadata.row_group(g).num_rows for g in range(min(span.stop, parquet.num_row_groups))
        ]
    except BROKEN_PARQUET as error:
        yield Bad(span.file, span.start, f"a broken parquet file: {error}")
        return
    begins = [0, *accumulate(sizes)]
    for group in range(span.start, len(sizes)):
        row = begins[group]
        try:
            for batch in parquet.iter_batches(ROWS, [group], wanted, use_threads=False):
                for found in rows_of(batch):
                    yield read_row(Row(span.file, row, found), text_key, chat)
                    row += 1
        except BROKEN_PARQUET as error:
            yield Bad(span.file, row, f"a broken parquet file: {error}")


def _open_parquet(path: Path) -> Any:
    import pyarrow.parquet  # takes 0.1 s to import, and few sources need it

    return pyarrow.parquet.ParquetFile(path)
