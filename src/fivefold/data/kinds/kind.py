"""What a kind of source offers, and how its files are opened: plain, compressed, or at an address.

A kind reads a file from any place behind a document on, one document after the other, each with the place behind it.
A long text comes in pieces of about a megabyte, which are cut at the same places wherever reading begins.
"""

from __future__ import annotations

import bz2
import gzip
import io
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from fivefold.data.chat import ANSWER, MESSAGES, Message, NotAConversation, messages_of
from fivefold.data.kinds.remote import Remote
from fivefold.errors import UserError
from fivefold.files import open_file

SPAN = 1 << 20  # bytes
LONGEST_LINE = 1 << 28
"""Bytes of a .jsonl line or of a row of .json or .csv, which are held in memory as a whole."""
ENDED = 1 << 62
"""The place behind a file that cannot be read any further."""
TOKENS = "tokens:"
"""What a source of ids begins with."""
TRAIN, VAL = 0, 1
BY_RULE = -1  # the document's hash chooses its split
PACKED = (".gz", ".bz2", ".zst")
"""Compressions that are known."""
ZSTD_WINDOW = 1 << 27  # bytes that decompressing may need; those of `zstd --long=27`
ZSTD_READ = 1 << 12  # compressed bytes taken at once; they become 128 MiB at most


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

    @property
    def plain(self) -> bool:
        """Reading may begin anywhere in its bytes."""
        return not (self.packed or self.url)

    def open(self, start: int = 0) -> BinaryIO:
        """Its content, uncompressed, from byte `start` on.

        Raises:
            UserError: an extra is missing, or the network failed.
            OSError: it cannot be opened. Reading raises it, too, where the compression is broken.
        """
        library = None
        if self.packed == ".zst":
            try:
                import zstandard as library
            except ImportError:
                raise UserError(
                    f"data.source: {self.where} needs the extra `zstd`: pip install 'fivefold[zstd]'"
                ) from None
        file: Any = io.BufferedReader(Remote(self.url), SPAN) if self.url else open_file(self.path)
        if self.packed:
            unpacked: Any = _Frames(file, library) if library else gzip.GzipFile(fileobj=file)
            unpacked = bz2.BZ2File(file) if self.packed == ".bz2" else unpacked
            file = io.BufferedReader(_Unpacked(file, unpacked), 1 << 18)
        if file.seekable():
            file.seek(start)
        else:
            while start and (chunk := file.read(min(start, SPAN))):
                start -= len(chunk)
        return file


class Fields(NamedTuple):
    """What is read of a row. text: name of the field with the text. chat: rows may be conversations."""

    text: str
    chat: bool = False


class Document(NamedTuple):
    """A document, or a piece of a text.

    place: byte offset in the file (text: of the piece; jsonl: of the line) or row number. split: TRAIN, VAL or BY_RULE.
    begins, ends: the piece is the first, the last of its document. messages: those of a conversation, whose text is
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


Documents = Iterator[tuple[Document | Bad, int]]
"""Documents, and the place behind each."""


def unreadable(error: OSError) -> str:
    reason = error.strerror or str(error)
    return reason if "decompressed" in reason else f"cannot be read: {reason}"


class Kind(ABC):
    """A kind of source. A subclass is an entry of the registry (`kinds/__init__.py`); an instance holds no state.

    name: as the cache's keys have it. suffixes: of the files' names. packs: files may be compressed. one_document: a
    file is one document, and its place decides its split; else each row has its own. by_bytes: places are bytes.
    """

    name: str
    suffixes: tuple[str, ...] = ()
    packs = True
    one_document = False
    by_bytes = True

    @abstractmethod
    def read(self, number: int, file: File, start: int, fields: Fields, cut: int | None = None) -> Documents:
        """The documents of files[number] from place `start` on, and the place behind each. An unreadable one comes as
        `Bad`, and reading continues. cut: the byte at which the validation part of a text begins."""

    def claims(self, file: File) -> bool:
        """False for a file of a folder that has the suffix by chance."""
        return True

    def near(self, file: File, byte: int) -> int | None:
        """A place near a byte where reading may begin; None: it is not known without what is before it."""
        try:
            return 0 if byte == 0 else self.behind(file, byte) if file.plain else None
        except (OSError, ValueError):  # its reader will report it
            return None

    def behind(self, file: File, byte: int) -> int | None:
        """`near` in the middle of a plain file."""
        return None

    def place(self, file: File, bad: Bad) -> str:
        """Where a bad document stands, in words."""
        return f"byte {bad.place}"


class Rows(Kind):
    """A kind whose files are rows with fields. A subclass has `rows` only."""

    by_bytes = False

    @abstractmethod
    def rows(self, file: File, fields: Fields, done: int) -> Iterator[tuple[int, dict[str, Any] | str]]:
        """Number and fields of each row, or why it cannot be read. Those before `done` need not be among them. Raises
        OSError: the file cannot be read any further."""

    def read(self, number: int, file: File, start: int, fields: Fields, cut: int | None = None) -> Documents:
        behind = start  # it may have become unreadable before this place
        try:
            for row, value in self.rows(file, fields, start):
                if row >= start:
                    behind = row + 1
                    bad = isinstance(value, str)
                    yield Bad(number, row, value) if bad else document_of(number, row, value, fields), behind
        except OSError as error:
            yield Bad(number, behind, unreadable(error)), ENDED

    def place(self, file: File, bad: Bad) -> str:
        return f"row {bad.place}"


class Shard(NamedTuple):
    """`tokens` ids of type `dtype` in `path`, from byte `offset` on. digests: of the blocks of these bytes; None: they
    are not known. advice: what to do if one differs. index: the file of Megatron-LM that says where documents end, and
    a hash of it, or "". assumed: the file does not say its dtype."""

    path: Path
    dtype: str
    offset: int
    tokens: int
    digests: bytes | None = None
    advice: str = ""
    index: tuple[Path, str] | None = None
    assumed: bool = False


class TokenKind(ABC):
    """A kind of files of ids (`tokens:PATH`). A subclass is an entry of the registry; an instance holds no state.

    suffix: of the files' names. copied: the ids cannot be read in place, and are copied to the cache.
    """

    name: str
    suffix: str
    copied = False

    def has(self, path: Path) -> bool:
        """True if a file is of this kind. The first kind of the registry that has it reads it."""
        return path.suffix == self.suffix

    @abstractmethod
    def shard(self, path: Path, dtype: str) -> Shard:
        """Where the ids lie. dtype: that of ids in files that do not say it.

        Raises:
            UserError: the file is damaged.
            OSError: it cannot be read.
        """

    def pieces(self, path: Path, end: int | None) -> Iterator[np.ndarray]:
        """The ids of a file that is copied, as <u4; of other kinds none. end: the token behind each document that does
        not end with it. Raises UserError: they are not ids."""
        return iter(())


def document_of(file: int, place: int, row: dict[str, Any], fields: Fields) -> Document | Bad:
    """The text of a row, or if it may be a conversation, its messages, as a document."""
    text, reason = row.get(fields.text), ""
    if fields.chat and MESSAGES in row:
        try:
            messages = messages_of(row[MESSAGES])
        except NotAConversation as error:
            return Bad(file, place, str(error))
        if any(message["role"] == ANSWER for message in messages):
            text = "\n".join(m["content"] for m in messages)
            return Document(file, place, text, BY_RULE, messages=messages)
        reason = f"no message has the role '{ANSWER}', so there is nothing to learn"
    elif fields.text not in row and MESSAGES in row:
        reason = f"no field {fields.text!r}, but {MESSAGES!r}: a conversation needs data.chat_template"
    elif fields.text not in row:
        names = ", ".join(sorted(map(str, row))[:10])
        reason = f"no field {fields.text!r} (fields: {names or 'none'}); set data.text_key"
    elif not isinstance(text, str):
        reason = f"the field {fields.text!r} holds {type(text).__name__}, not text"
    else:
        try:
            text.encode("utf-8")
            return Document(file, place, text, BY_RULE)
        except UnicodeEncodeError as error:
            reason = f"a lone surrogate at character {error.start}: not valid Unicode"
    return Bad(file, place, reason)


class _Frames:
    """The content of a .zst. The library's own reader takes a file that was cut off for a shorter one."""

    def __init__(self, raw: BinaryIO, library: Any):
        self._raw, self._library = raw, library.ZstdDecompressor(max_window_size=ZSTD_WINDOW)
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
        except Exception as error:
            broken = isinstance(error, EOFError | zlib.error | gzip.BadGzipFile)
            if not broken and not type(error).__module__.startswith("zstandard"):
                raise
            raise OSError(f"cannot be decompressed: {error}") from None
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._raw.close()
        super().close()
