"""What a kind of source offers, and the pieces in which its files are read.

Files of which any part can be read are cut into spans, which is pure arithmetic: workers read them. Others (compressed,
elsewhere, or of a kind whose parts cannot be found) are read once, from their start on, by one process. It hands their
content to the workers in blocks that end with a line, or in rows. A text is cut at the same places either way, so
a.txt.gz gives the tokens of a.txt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from fivefold.data.conversations import ANSWER, MESSAGES, Message, NotAConversation, messages_of
from fivefold.data.kinds.opening import opened

SPAN = 1 << 20  # bytes
LINE_SEARCH = 1 << 17  # bytes searched for a line break; without one, a text is cut between characters
LONGEST_LINE = 1 << 28
"""Bytes of a .jsonl line or of a row of .json or .csv, which are held in memory as a whole."""
ENDED = 1 << 62
"""The place behind a file that cannot be read any further."""
TRAIN, VAL = 0, 1
BY_RULE = -1  # the piece holds many documents, and each one's hash chooses its split


class File(NamedTuple):
    """A file of a source.

    name: path below the source's root. It decides order and split, so the same tree gives the same data anywhere. kind:
    the name of its kind. size: bytes as they lie there, or -1 if the file cannot be read. packed: its compression, or
    "". url: its address, if it lies elsewhere; version: what its server says of the content.
    """

    name: str
    path: Path
    kind: str
    size: int
    packed: str = ""
    url: str = ""
    version: str = ""

    @property
    def where(self) -> str:
        return self.url or str(self.path)

    def open(self) -> BinaryIO:
        """Its content, uncompressed: see `opened`."""
        return opened(self.path, self.packed, self.url)


class Fields(NamedTuple):
    """What is read of a row. text: name of the field with the text. chat: rows may be conversations."""

    text: str
    chat: bool = False


class FileSpan(NamedTuple):
    """Bytes [start, stop) of files[file] (row groups for parquet), inside the document [low, high) of a text.

    end: an end token follows the document's last span.
    """

    file: int
    start: int
    stop: int
    low: int
    high: int
    split: int
    end: bool


class Block(NamedTuple):
    """Whole lines of a .jsonl, or a piece of a text. place: its first byte, uncompressed. begins, ends: as in
    `Document`. reason: why it cannot be read."""

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


class Fault(str):
    """In place of a row: why its file cannot be read any further, at whatever row a run begins. A fault of the content
    is a text, which whoever goes on behind it has said."""


def unreadable(error: OSError) -> Fault:
    reason = error.strerror or str(error)
    return Fault(reason if "decompressed" in reason else f"cannot be read: {reason}")


Task = list[FileSpan] | list[Block] | list[Row]


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


class Cutter(Protocol):
    """Cuts the content of a file into blocks. at: the byte behind the last one. ended: its document ends with it."""

    at: int
    ended: bool

    def next(self) -> tuple[bytes, str] | None:
        """The next block, and why it cannot be read ("": it can); None: the file has ended."""
        ...


class Kind(ABC):
    """A kind of source. A subclass of `Blocks` or `Rows` is an entry of the registry (`kinds/__init__.py`); an instance
    holds no state.

    name: as the cache's keys have it. suffixes: of the files' names. from_start: no part of a file can be found without
    what is before it. packs: files may be compressed. one_document: a file is one document, and its place decides its
    split; else each row has its own. by_bytes: spans and places are bytes.
    """

    name: str
    suffixes: tuple[str, ...] = ()
    from_start = False
    packs = True
    one_document = False
    by_bytes = True

    def length(self, file: File) -> int:
        """What spans cut: bytes, or another unit of the kind."""
        return file.size

    def read(self, file: File, span: FileSpan, fields: Fields) -> Iterator[Document | Bad]:
        """The documents of a span, if not `from_start`."""
        raise AssertionError(f"{self.name} is read from its start")

    def read_block(self, block: Block, fields: Fields) -> Iterator[Document | Bad]:
        """The documents of a block, if its tasks have any."""
        raise AssertionError(f"{self.name} has no blocks")

    @abstractmethod
    def tasks(
        self, number: int, file: File, split: int, cut: int | None, done: int, separated: bool, fields: Fields
    ) -> Iterator[tuple[Task, int]]:
        """A file that is read from its start, from byte or row `done` on, and the place behind each task.

        split: where its documents go; cut: the byte from which on a text is validation instead. separated: an end token
        follows a text.
        """

    def place(self, file: File, bad: Bad) -> str:
        """Where a bad document stands, in words."""
        return f"byte {bad.place}"


class Blocks(Kind):
    """A kind whose files are bytes, which are cut into blocks."""

    @abstractmethod
    def cutter(self, f: BinaryIO, at: int, cut: int | None) -> Cutter:
        """Cuts a file from byte `at` on. cut: the byte at which a second document begins."""

    def tasks(
        self, number: int, file: File, split: int, cut: int | None, done: int, separated: bool, fields: Fields
    ) -> Iterator[tuple[Task, int]]:
        at = done
        try:
            with file.open() as f:
                _skip(f, at)
                cutter = self.cutter(f, at, cut)
                while (piece := cutter.next()) is not None:
                    content, reason = piece
                    begins, ends = at == 0 or at == cut, cutter.ended
                    goes = split if cut is None else int(at >= cut)
                    yield [Block(number, at, goes, begins, ends and separated, reason, content)], cutter.at
                    at = cutter.at
        except OSError as error:
            yield [Block(number, at, split, False, False, unreadable(error), b"")], ENDED


def _skip(f: BinaryIO, count: int) -> None:
    if count and f.seekable():
        f.seek(count)
        return
    while count and (chunk := f.read(min(count, SPAN))):
        count -= len(chunk)


class Rows(Kind):
    """A kind whose files are rows with fields. A subclass of one that is read from its start has `rows` only."""

    from_start = True
    by_bytes = False

    @abstractmethod
    def rows(self, file: File, fields: Fields, done: int) -> Iterator[tuple[int, dict[str, Any] | str]]:
        """Number and fields of each row, or why it cannot be read. Those before `done` need not be among them. A
        `Fault` is the last."""

    def tasks(
        self, number: int, file: File, split: int, cut: int | None, done: int, separated: bool, fields: Fields
    ) -> Iterator[tuple[Task, int]]:
        if done == ENDED:
            return iter(())
        rows = (
            Row(number, max(place, done), value)  # a file may have become unreadable before this place
            for place, value in self.rows(file, fields, done)
            if place >= done or isinstance(value, Fault)
        )
        return row_tasks(rows, fields)

    def place(self, file: File, bad: Bad) -> str:
        return f"row {bad.place}"


def row_tasks(rows: Iterator[Row], fields: Fields) -> Iterator[tuple[list[Row], int]]:
    """Rows gathered into tasks of about SPAN characters, and the number of the row behind each."""
    task: list[Row] = []
    size = 0
    for row in rows:
        value = row.value
        if isinstance(value, dict):
            value, characters = _needed(value, fields)
            size += characters
        task.append(row._replace(value=value))
        size += 1
        if size >= SPAN:
            yield task, row.number + 1
            task, size = [], 0
    if task:
        yield task, ENDED if isinstance(task[-1].value, Fault) else task[-1].number + 1


def _needed(row: dict[str, Any], fields: Fields) -> tuple[dict[str, Any], int]:
    """What of a row goes to a worker, and its characters: the text or the messages, or else names for the error."""
    text = row.get(fields.text)
    if fields.chat and row.get(MESSAGES) is not None:
        return {MESSAGES: row[MESSAGES]}, len(str(row[MESSAGES]))
    if isinstance(text, str):
        return {fields.text: text}, len(text)
    return dict.fromkeys(map(str, row)) | _small(fields.text, row), 0


def _small(key: str, row: dict[str, Any]) -> dict[str, Any]:
    value = row.get(key)
    return {key: value} if isinstance(value, int | float | bool) else {}


def read_row(row: Row, fields: Fields) -> Document | Bad:
    """A row as a document."""
    if isinstance(row.value, str):
        return Bad(row.file, row.number, row.value)
    return document_of(row.file, row.number, row.value, fields)


def document_of(file: int, place: int, row: dict[str, Any], fields: Fields) -> Document | Bad:
    """The text of a row, or if it may be a conversation, its messages, as a document."""
    if fields.chat and MESSAGES in row:
        try:
            messages = messages_of(row[MESSAGES])
        except NotAConversation as error:
            return Bad(file, place, str(error))
        if not any(message["role"] == ANSWER for message in messages):
            return Bad(file, place, f"no message has the role '{ANSWER}', so there is nothing to learn")
        return Document(file, place, "\n".join(m["content"] for m in messages), BY_RULE, messages=messages)
    if fields.text not in row:
        names = ", ".join(sorted(map(str, row))[:10])
        if MESSAGES in row:
            return Bad(
                file,
                place,
                f"no field {fields.text!r}, but {MESSAGES!r}: a conversation needs data.chat_template",
            )
        return Bad(file, place, f"no field {fields.text!r} (fields: {names or 'none'}); set data.text_key")
    text = row[fields.text]
    if not isinstance(text, str):
        return Bad(file, place, f"the field {fields.text!r} holds {type(text).__name__}, not text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return Bad(file, place, f"a lone surrogate at character {error.start}: not valid Unicode")
    return Document(file, place, text, BY_RULE)
