"""Cuts a source into spans of about a megabyte: the unit of parallel work, and what bounds memory.

A span is pure arithmetic (file, nominal start and stop); whoever reads it moves both ends to a line border
by the same rule, so that neighbours meet exactly and planning a terabyte reads nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fivefold.data.sources import File

SPAN = 1 << 20  # bytes
TRAIN, VAL, BY_RULE = 0, 1, -1  # BY_RULE: the span holds many documents, each goes where its hash says


class Span(NamedTuple):
    """Bytes [start, stop) of files[file] (for parquet: row groups); of a text, within document [low, high).

    end: an end token follows the document's last span."""

    file: int
    start: int
    stop: int
    low: int
    high: int
    split: int
    end: bool


Job = list[Span]  # what a worker does at once: small files together, or one piece of a large one


@dataclass(frozen=True)
class Plan:
    """How a source's files are split. A text file is one document, all of it in one split.

    val: files held out. cut: if the source is a single text, where its validation part begins, in bytes.
    """

    files: list[File]
    val: frozenset[int] = frozenset()
    cut: int | None = None
    row_groups: dict[int, int] = field(default_factory=dict)

    @property
    def single(self) -> bool:
        """One text only: nothing to separate, so no end token (which gives nanoGPT's split)."""
        return len(self.files) == 1 and self.files[0].kind == "text"


def plan(files: list[File], val_fraction: float, row_groups: dict[int, int]) -> Plan:
    """Chooses the text files held out: in the order of a hash of their names, as many as fit into
    val_fraction of the bytes; the smallest if none fits. A single text is cut by its characters."""
    texts = [i for i, f in enumerate(files) if f.kind == "text" and f.size > 0]
    if val_fraction == 0 or not texts:
        return Plan(files, row_groups=row_groups)
    if len(files) == 1:
        return Plan(files, cut=cut_at(files[0], val_fraction), row_groups=row_groups)
    if len(texts) == 1:  # the other documents are in .jsonl or .parquet files: held out one by one
        return Plan(files, row_groups=row_groups)
    budget = val_fraction * sum(files[i].size for i in texts)
    chosen = set()
    for i in sorted(texts, key=lambda i: document_hash(files[i].name)):
        if files[i].size <= budget:
            chosen.add(i)
            budget -= files[i].size
    smallest = min(texts, key=lambda i: (files[i].size, document_hash(files[i].name)))
    return Plan(files, frozenset(chosen or {smallest}), row_groups=row_groups)


def jobs(plan: Plan) -> Iterator[Job]:
    """The spans of every file in order, small ones gathered into jobs of about SPAN bytes."""
    job: Job = []
    size = 0
    for span, span_size in _spans(plan):
        job.append(span)
        size += span_size
        if size >= SPAN:
            yield job
            job, size = [], 0
    if job:
        yield job


def document_hash(name: str, offset: int = 0) -> int:
    """64 bits that decide a document's split: a function of the file's name and its place in the file."""
    digest = hashlib.blake2b(f"{offset} {name}".encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def cut_at(file: File, val_fraction: float) -> int:
    """The byte where character int(n (1 - val_fraction)) of a UTF-8 text of n characters begins."""
    try:
        total = sum(int(starts.sum()) for _, starts in _character_starts(file))
    except OSError:
        return file.size  # its reader will say why
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


def _spans(plan: Plan) -> Iterator[tuple[Span, int]]:
    for i, file in enumerate(plan.files):
        if file.kind == "parquet":
            groups = plan.row_groups.get(i, 1)
            for g in range(groups):
                yield Span(i, g, g + 1, 0, groups, BY_RULE, True), max(1, file.size // groups)
        elif file.kind == "jsonl":
            for start, stop in _cut(0, file.size):
                yield Span(i, start, stop, 0, file.size, BY_RULE, True), stop - start
        else:
            parts = [(0, file.size, VAL if i in plan.val else TRAIN)]
            if plan.cut is not None:
                parts = [(0, plan.cut, TRAIN), (plan.cut, file.size, VAL)]
            for low, high, split in parts:
                for start, stop in _cut(low, high):
                    yield Span(i, start, stop, low, high, split, not plan.single), stop - start


def _cut(low: int, high: int) -> Iterator[tuple[int, int]]:
    if high < 0:  # cannot be read: one span, whose reader will say why
        yield 0, 0
    for start in range(low, high, SPAN):
        yield start, min(start + SPAN, high)
