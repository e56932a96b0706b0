"""Cuts a source into tasks of about a megabyte, the unit of parallel work. Their size bounds memory.

Files are cut into spans. A span is pure arithmetic (file, nominal start and stop), so cutting a terabyte reads nothing.
Its reader moves both ends to a line border by the same rule, so that neighbours meet exactly. What has to be read from
its start (compressed, elsewhere, .json, a data set of the hub) is read here, once, and its content goes to the workers.

Every task comes with the place behind it, from which the others can be made without it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np

from fivefold.data import remote, sequential
from fivefold.data.sequential import SPAN, Block, Row
from fivefold.data.sources import File, Hub
from fivefold.errors import UserError

TRAIN, VAL, BY_RULE = (
    0,
    1,
    -1,
)  # BY_RULE: the span holds many documents, and each one's hash chooses its split
Place = Sequence[int]
"""Where a source's next task begins: [run of files, tasks, bytes or rows of it that are done]. [] is the start."""


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


Task = list[FileSpan] | list[Block] | list[Row]


@dataclass(frozen=True)
class FileSplit:
    """The files of a source and their split. A text file is one document and belongs to one split.

    val: held-out files. cut: the byte where the validation part of a single text begins. pieces: the megabytes of a
    single text are held out by their hashes instead, as documents are.
    """

    files: list[File]
    val: frozenset[int] = frozenset()
    cut: int | None = None
    row_groups: dict[int, int] = field(default_factory=dict)
    pieces: bool = False

    @property
    def single(self) -> bool:
        """The source is one text. It needs no end token to separate documents (as in nanoGPT's split)."""
        return len(self.files) == 1 and self.files[0].kind == "text"


def split_files(
    files: list[File], val_fraction: float, row_groups: dict[int, int], stream: bool = False
) -> FileSplit:
    """Chooses the held-out text files in the order of a hash of their names.

    It takes as many as fit into val_fraction of the bytes, or the smallest if none fits. A single text is cut by its
    characters; stream: that would read all of it, so its megabytes are held out by their hashes.
    """
    texts = [i for i, f in enumerate(files) if f.kind == "text" and f.size > 0]
    if val_fraction == 0 or not texts:
        return FileSplit(files, row_groups=row_groups)
    if len(files) == 1 and stream:
        return FileSplit(files, row_groups=row_groups, pieces=True)
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


def tasks(split: FileSplit, text_key: str, chat: bool, start: Place) -> Iterator[tuple[Task, Place]]:
    """The tasks of every file in order, and the place behind each."""
    for number, run in enumerate(_runs(split.files)):
        if not start or number >= start[0]:
            done = start[1] if start and number == start[0] else 0
            for task, place in _tasks(split, run, text_key, chat, done):
                yield task, [number, place]


def first_task(files: list[File], i: int, text_key: str, chat: bool) -> Task:
    """The beginning of one file."""
    return next((task for task, _ in _tasks(FileSplit(files), [i], text_key, chat, 0)), [])


def samples(split: FileSplit, text_key: str, chat: bool, wanted: int) -> Iterator[Task]:
    """About `wanted` tasks that are spread evenly over the source: of what can only be read from its start, the
    beginnings."""
    runs = _runs(split.files)
    chosen = runs[:: max(1, len(runs) // wanted)]
    for run in chosen:
        if split.files[run[0]].from_start:
            here = islice(_tasks(split, run, text_key, chat, 0), max(1, wanted // len(chosen)))
        else:
            size = sum(max(0, split.files[i].size) for i in run)
            here = islice(_tasks(split, run, text_key, chat, 0), 0, None, max(1, size // (SPAN * wanted)))
        yield from (task for task, _ in here)


def _runs(files: list[File]) -> list[list[int]]:
    """Numbers of files: neighbours of which any part can be read, and each other file by itself."""
    keys = [i if f.from_start else -1 for i, f in enumerate(files)]
    return [list(group) for _, group in groupby(range(len(files)), key=keys.__getitem__)]


def _tasks(
    split: FileSplit, run: list[int], text_key: str, chat: bool, done: int
) -> Iterator[tuple[Task, int]]:
    first = split.files[run[0]]
    if not first.from_start:
        yield from islice(((task, n) for n, task in enumerate(_span_tasks(split, run), 1)), done, None)
    elif first.kind in ("text", "jsonl"):
        goes = _split_of(split, run[0])
        yield from sequential.block_tasks(run[0], first, goes, split.cut, done, not split.single)
    else:
        yield from sequential.row_tasks(sequential.rows(run[0], first, text_key, chat, done), text_key, chat)


def _span_tasks(split: FileSplit, run: list[int]) -> Iterator[list[FileSpan]]:
    """The spans of some files. Small ones are gathered into tasks of about SPAN bytes."""
    task: list[FileSpan] = []
    size = 0
    for span, span_size in _spans(split, run):
        if task and split.files[span.file].kind == "parquet" and task[-1].file == span.file:
            task[-1] = task[-1]._replace(stop=span.stop)  # row groups of a file that is opened once
        else:
            task.append(span)
        size += span_size
        if size >= SPAN:
            yield task
            task, size = [], 0
    if task:
        yield task


def _split_of(split: FileSplit, i: int) -> int:
    """Where the documents of a file go that is not cut."""
    if split.files[i].kind != "text" or split.pieces:
        return BY_RULE
    return VAL if i in split.val else TRAIN


def document_hash(name: str, offset: int = 0) -> int:
    """64 bits that decide a document's split. They depend on the file's name and the document's place in it."""
    digest = hashlib.blake2b(f"{offset} {name}".encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def cut_at(file: File, val_fraction: float) -> int:
    """The byte where character int(n (1 - val_fraction)) of a UTF-8 text of n characters begins."""
    try:
        total = sum(int(starts.sum()) for _, starts in _character_starts(file))
    except OSError:
        return max(0, file.size)  # its reader will report the error
    wanted, seen, end = int(total * (1 - val_fraction)), 0, 0
    for offset, starts in _character_starts(file):
        here, end = int(starts.sum()), offset + len(starts)
        if seen + here > wanted:
            return offset + int(np.flatnonzero(starts)[wanted - seen])
        seen += here
    return end


def _character_starts(file: File) -> Iterator[tuple[int, np.ndarray]]:
    at = 0
    with sequential.opened(file) as f:
        while chunk := f.read(1 << 22):
            yield at, (np.frombuffer(chunk, np.uint8) & 0xC0) != 0x80
            at += len(chunk)


def _spans(split: FileSplit, run: list[int]) -> Iterator[tuple[FileSpan, int]]:
    for i in run:
        file = split.files[i]
        if file.kind == "parquet":
            groups = split.row_groups.get(i, 1)
            for g in range(groups):
                yield FileSpan(i, g, g + 1, 0, groups, BY_RULE, True), max(1, file.size // groups)
        elif file.kind == "jsonl":
            for start, stop in _cut(0, file.size):
                yield FileSpan(i, start, stop, 0, file.size, BY_RULE, True), stop - start
        else:
            parts = [(0, file.size, _split_of(split, i))]
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


def hub_fingerprint(hub: Hub) -> list[Any]:
    """Identity of a hub data set's content: the hash that `datasets` computes of its revision and files."""
    builder = _call("load_dataset_builder", hub)
    known = ["hf", hub.name, builder.config.name, str(builder.hash), str(builder.info.version)]
    return known if hub[2:] == Hub(hub.name)[2:] else [*known, *hub[2:]]


def hub_tasks(hub: Hub, text_key: str, chat: bool, start: Place) -> Iterator[tuple[Task, Place]]:
    """The rows of a hub data set, gathered into tasks of about SPAN characters. chat: rows may be conversations."""
    rows = _rows(hub, start[1] if start else hub.first)
    for task, place in sequential.row_tasks(rows, text_key, chat):
        yield task, [0, place]


def _rows(hub: Hub, first: int) -> Iterator[Row]:
    """Rows from `first` on. After an error it asks again, from where it was."""
    read, failed = first, 0
    while True:
        try:
            found = _call("load_dataset", hub, split=hub.split, streaming=True)
            rows = iter(found.skip(read) if read else found)
            while hub.stop is None or read < hub.stop:
                try:
                    row = next(rows)
                except StopIteration:
                    return
                yield Row(0, read, row)
                read, failed = read + 1, 0
            return
        except UserError:
            raise
        except Exception as error:  # network error, or a file that the library cannot read
            if failed == len(remote.DELAYS):
                reason = f"{type(error).__name__}: {remote.shown(str(error))}"
                raise UserError(
                    f"data.source = 'hf:{hub.name}': reading stopped after {read:,} rows: {reason}"
                ) from error
            time.sleep(remote.DELAYS[failed])
            failed += 1


def needs_datasets(name: str) -> str:
    return f"data.source = 'hf:{name}' needs the extra `hf`: pip install 'fivefold[hf]'"


def _call(function: str, hub: Hub, **options: Any) -> Any:
    try:
        import datasets  # type: ignore[import-not-found]  # the optional extra
    except ImportError:
        raise UserError(needs_datasets(hub.name)) from None
    try:
        return getattr(datasets, function)(hub.name, hub.config, **options)
    except Exception as error:  # not found, no network, gated, missing config: these share no base class
        raise UserError(
            f"data.source = 'hf:{hub.name}': {type(error).__name__}: {remote.shown(str(error))}"
        ) from error
