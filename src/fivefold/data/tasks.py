"""Cuts a source into tasks of about a megabyte, the unit of parallel work. Their size bounds memory.

Files are cut into spans. A span is pure arithmetic (file, nominal start and stop), so cutting a terabyte reads nothing.
Its reader moves both ends to a line border by the same rule, so that neighbours meet exactly. What has to be read from
its start is read here, once, and its content goes to the workers.

Every task comes with the place behind it, from which the others can be made without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice

import numpy as np

from fivefold.data.kinds import File, FileSpan, Task, from_start, kind_of
from fivefold.data.kinds.kind import BY_RULE, SPAN, TRAIN, VAL, Fields

Place = Sequence[int]
"""Where a source's next task begins: [run of files, tasks, bytes or rows of it that are done]. [] is the start."""


@dataclass(frozen=True)
class FileSplit:
    """The files of a source and their split. A text file is one document and belongs to one split. lengths: what spans
    cut of each file of which any part can be read.

    val: held-out files. cut: the byte where the validation part of a single text begins. pieces: the megabytes of a
    single text are held out by their hashes instead, as documents are.
    """

    files: list[File]
    val: frozenset[int] = frozenset()
    cut: int | None = None
    lengths: dict[int, int] = field(default_factory=dict)
    pieces: bool = False

    @property
    def single(self) -> bool:
        """The source is one text. It needs no end token to separate documents (as in nanoGPT's split)."""
        return len(self.files) == 1 and kind_of(self.files[0]).one_document


def split_files(files: list[File], val_fraction: float, stream: bool = False) -> FileSplit:
    """Chooses the held-out text files in the order of a hash of their names.

    It takes as many as fit into val_fraction of the bytes, or the smallest if none fits. A single text is cut by its
    characters; stream: that would read all of it, so its megabytes are held out by their hashes.
    """
    lengths = {i: kind_of(f).length(f) for i, f in enumerate(files) if not from_start(f)}
    texts = [i for i, f in enumerate(files) if kind_of(f).one_document and f.size > 0]
    if val_fraction == 0 or not texts:
        return FileSplit(files, lengths=lengths)
    if len(files) == 1 and stream:
        return FileSplit(files, lengths=lengths, pieces=True)
    if len(files) == 1:
        return FileSplit(files, cut=cut_at(files[0], val_fraction), lengths=lengths)
    if len(texts) == 1:  # the other documents are rows of files, held out one by one
        return FileSplit(files, lengths=lengths)
    budget = val_fraction * sum(files[i].size for i in texts)
    chosen = set()
    for i in sorted(texts, key=lambda i: document_hash(files[i].name)):
        if files[i].size <= budget:
            chosen.add(i)
            budget -= files[i].size
    smallest = min(texts, key=lambda i: (files[i].size, document_hash(files[i].name)))
    return FileSplit(files, frozenset(chosen or {smallest}), lengths=lengths)


def tasks(split: FileSplit, fields: Fields, start: Place) -> Iterator[tuple[Task, Place]]:
    """The tasks of every file in order, and the place behind each."""
    for number, run in enumerate(_runs(split.files)):
        if not start or number >= start[0]:
            done = start[1] if start and number == start[0] else 0
            for task, place in _tasks(split, run, fields, done):
                yield task, [number, place]


def samples(split: FileSplit, fields: Fields, wanted: int) -> Iterator[Task]:
    """About `wanted` tasks that are spread evenly over the source: of what can only be read from its start, the
    beginnings."""
    runs = _runs(split.files)
    chosen = runs[:: max(1, len(runs) // wanted)]
    for run in chosen:
        if from_start(split.files[run[0]]):
            here = islice(_tasks(split, run, fields, 0), max(1, wanted // len(chosen)))
        else:
            size = sum(max(0, split.files[i].size) for i in run)
            here = islice(_tasks(split, run, fields, 0), 0, None, max(1, size // (SPAN * wanted)))
        yield from (task for task, _ in here)


def _runs(files: list[File]) -> list[list[int]]:
    """Numbers of files: neighbours of which any part can be read, and each other file by itself."""
    keys = [i if from_start(f) else -1 for i, f in enumerate(files)]
    return [list(group) for _, group in groupby(range(len(files)), key=keys.__getitem__)]


def _tasks(split: FileSplit, run: list[int], fields: Fields, done: int) -> Iterator[tuple[Task, int]]:
    first = split.files[run[0]]
    if from_start(first):
        goes = _split_of(split, run[0])
        yield from kind_of(first).tasks(run[0], first, goes, split.cut, done, not split.single, fields)
    else:
        yield from islice(((task, n) for n, task in enumerate(_span_tasks(split, run), 1)), done, None)


def _span_tasks(split: FileSplit, run: list[int]) -> Iterator[list[FileSpan]]:
    """The spans of some files. Small ones are gathered into tasks of about SPAN bytes."""
    task: list[FileSpan] = []
    size = 0
    for span, span_size in _spans(split, run):
        if task and not kind_of(split.files[span.file]).by_bytes and task[-1].file == span.file:
            task[-1] = task[-1]._replace(stop=span.stop)  # of a file that is opened once
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
    if not kind_of(split.files[i]).one_document or split.pieces:
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
    with file.open() as f:
        while chunk := f.read(1 << 22):
            yield at, (np.frombuffer(chunk, np.uint8) & 0xC0) != 0x80
            at += len(chunk)


def _spans(split: FileSplit, run: list[int]) -> Iterator[tuple[FileSpan, int]]:
    """The spans of some files, and about how many bytes each has."""
    for i in run:
        length, by_bytes = split.lengths[i], kind_of(split.files[i]).by_bytes
        parts = [(0, length, _split_of(split, i))]
        if split.cut is not None:
            parts = [(0, split.cut, TRAIN), (split.cut, length, VAL)]
        for low, high, goes in parts:
            for start, stop in _cut(low, high, SPAN if by_bytes else 1):
                size = stop - start if by_bytes else max(1, split.files[i].size // length)
                yield FileSpan(i, start, stop, low, high, goes, not split.single), size


def _cut(low: int, high: int, step: int) -> Iterator[tuple[int, int]]:
    if high < 0:  # the file cannot be read; the reader of this span will report it
        yield 0, 0
    for start in range(low, high, step):
        yield start, min(start + step, high)


def beginning(files: list[File], i: int, fields: Fields, most: int) -> Task:
    """The first `most` bytes of a file, or about a megabyte if they cannot be counted. Nothing else is read."""
    if from_start(files[i]):
        return next((task for task, _ in _tasks(FileSplit(files), [i], fields, 0)), [])
    stop, high = (most, files[i].size) if kind_of(files[i]).by_bytes else (1, 1)
    return [FileSpan(i, 0, stop, 0, high, BY_RULE, True)]
