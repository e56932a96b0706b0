"""Cuts a source into tasks of about a megabyte, the unit of parallel work. Their size bounds memory.

Files are cut into spans. A span is pure arithmetic (file, nominal start and stop), so cutting a terabyte reads nothing.
Its reader moves both ends to a line border by the same rule, so that neighbours meet exactly. Data sets of the Hugging
Face hub are streamed: only the rows that are read are downloaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fivefold.data.conversations import MESSAGES
from fivefold.data.sources import File
from fivefold.errors import UserError

SPAN = 1 << 20  # bytes
TRAIN, VAL, BY_RULE = (
    0,
    1,
    -1,
)  # BY_RULE: the span holds many documents, and each one's hash chooses its split


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


Task = list[FileSpan] | list[tuple[int, dict[str, Any]]]  # spans, or (number, row) of a streamed data set


@dataclass(frozen=True)
class FileSplit:
    """The files of a source and their split. A text file is one document and belongs to one split.

    val: held-out files. cut: the byte where the validation part of a single text begins.
    """

    files: list[File]
    val: frozenset[int] = frozenset()
    cut: int | None = None
    row_groups: dict[int, int] = field(default_factory=dict)

    @property
    def single(self) -> bool:
        """The source is one text. It needs no end token to separate documents (as in nanoGPT's split)."""
        return len(self.files) == 1 and self.files[0].kind == "text"


def split_files(files: list[File], val_fraction: float, row_groups: dict[int, int]) -> FileSplit:
    """Chooses the held-out text files in the order of a hash of their names.

    It takes as many as fit into val_fraction of the bytes, or the smallest if none fits. A single text is cut by its
    characters.
    """
    texts = [i for i, f in enumerate(files) if f.kind == "text" and f.size > 0]
    if val_fraction == 0 or not texts:
        return FileSplit(files, row_groups=row_groups)
    if len(files) == 1:
        return FileSplit(files, cut=cut_at(files[0], val_fraction), row_groups=row_groups)
    if len(texts) == 1:  # the other documents are rows of .jsonl or .parquet files, held out one by one
        return FileSplit(files, row_groups=row_groups)
    budget = val_fraction * sum(files[i].size for i in texts)
    chosen = set()
    for i in sorted(texts, key=lambda i: document_hash(files[i].name)):
        if files[i].size <= budget:
            chosen.add(i)
            budget -= files[i].size
    smallest = min(texts, key=lambda i: (files[i].size, document_hash(files[i].name)))
    return FileSplit(files, frozenset(chosen or {smallest}), row_groups=row_groups)


def tasks(split: FileSplit) -> Iterator[list[FileSpan]]:
    """The spans of every file in order. Small ones are gathered into tasks of about SPAN bytes."""
    task: list[FileSpan] = []
    size = 0
    for span, span_size in _spans(split):
        task.append(span)
        size += span_size
        if size >= SPAN:
            yield task
            task, size = [], 0
    if task:
        yield task


def document_hash(name: str, offset: int = 0) -> int:
    """64 bits that decide a document's split. They depend on the file's name and the document's place in it."""
    digest = hashlib.blake2b(f"{offset} {name}".encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def cut_at(file: File, val_fraction: float) -> int:
    """The byte where character int(n (1 - val_fraction)) of a UTF-8 text of n characters begins."""
    try:
        total = sum(int(starts.sum()) for _, starts in _character_starts(file))
    except OSError:
        return file.size  # its reader will report the error
    wanted, seen = int(total * (1 - val_fraction)), 0
    for offset, starts in _character_starts(file):
        here = int(starts.sum())
        if seen + here > wanted:
            return offset + int(np.flatnonzero(starts)[wanted - seen])
        seen += here
    return file.size


def _character_starts(file: File) -> Iterator[tuple[int, np.ndarray]]:
    with open(file.path, "rb") as f:
        while chunk := f.read(1 << 22):
            yield f.tell() - len(chunk), (np.frombuffer(chunk, np.uint8) & 0xC0) != 0x80


def _spans(split: FileSplit) -> Iterator[tuple[FileSpan, int]]:
    for i, file in enumerate(split.files):
        if file.kind == "parquet":
            groups = split.row_groups.get(i, 1)
            for g in range(groups):
                yield FileSpan(i, g, g + 1, 0, groups, BY_RULE, True), max(1, file.size // groups)
        elif file.kind == "jsonl":
            for start, stop in _cut(0, file.size):
                yield FileSpan(i, start, stop, 0, file.size, BY_RULE, True), stop - start
        else:
            parts = [(0, file.size, VAL if i in split.val else TRAIN)]
            if split.cut is not None:
                parts = [(0, split.cut, TRAIN), (split.cut, file.size, VAL)]
            for low, high, goes in parts:
                for start, stop in _cut(low, high):
                    yield FileSpan(i, start, stop, low, high, goes, not split.single), stop - start


def _cut(low: int, high: int) -> Iterator[tuple[int, int]]:
    if high < 0:  # the file cannot be read; the reader of this span will report it
        yield 0, 0
    for start in range(low, high, SPAN):
        yield start, min(start + SPAN, high)


SPLIT = "train"  # split of the hub's data set; `val_fraction` holds out a part of it, as for any source


def hub_fingerprint(name: tuple[str, str | None]) -> list[str]:
    """Identity of a hub data set's content: the hash that `datasets` computes of its revision and files."""
    builder = _call("load_dataset_builder", *name)
    return ["hf", name[0], builder.config.name, str(builder.hash), str(builder.info.version)]


def hub_tasks(
    name: tuple[str, str | None], text_key: str, chat: bool = False
) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    """(number, row) of every row of a hub data set, gathered into tasks of about SPAN characters. chat: rows may be
    conversations."""
    task: list[tuple[int, dict[str, Any]]] = []
    size = 0
    for number, row in enumerate(_rows(name)):
        text = row.get(text_key)
        # Only the text goes to the worker, or the messages. For a row without them, the names of its fields go, for the
        # message.
        if chat and row.get(MESSAGES) is not None:
            task.append((number, {MESSAGES: row[MESSAGES]}))
            size += sum(len(str(message)) for message in row[MESSAGES])
        else:
            task.append((number, {text_key: text} if isinstance(text, str) else dict.fromkeys(map(str, row))))
            size += len(text) if isinstance(text, str) else 1
        if size >= SPAN:
            yield task
            task, size = [], 0
    if task:
        yield task


def _rows(name: tuple[str, str | None]) -> Iterator[dict[str, Any]]:
    rows, read = iter(_call("load_dataset", *name, split=SPLIT, streaming=True)), 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # network error, or a file that the library cannot read
            reason = f"{type(error).__name__}: {error}"
            raise UserError(
                f"data.source = 'hf:{name[0]}': reading stopped after {read:,} rows: {reason}"
            ) from error
        yield row
        read += 1


def needs_datasets(name: str) -> str:
    return f"data.source = 'hf:{name}' needs the extra `hf`: pip install 'fivefold[hf]'"


def _call(function: str, name: str, config: str | None, **options: Any) -> Any:
    try:
        import datasets  # type: ignore[import-not-found]  # the optional extra
    except ImportError:
        raise UserError(needs_datasets(name)) from None
    try:
        return getattr(datasets, function)(name, config, **options)
    except Exception as error:  # not found, no network, gated, missing config: these share no base class
        raise UserError(f"data.source = 'hf:{name}': {type(error).__name__}: {error}") from error
