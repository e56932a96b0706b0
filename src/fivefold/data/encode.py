"""Turns jobs (spans of files, or rows of a streamed set) into token ids: what worker processes run."""

from __future__ import annotations

import json
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fivefold.data.documents import Bad, Document, document_of, read_span
from fivefold.data.sources import File
from fivefold.data.spans import BY_RULE, SPAN, TRAIN, VAL, Job, Span, document_hash
from fivefold.data.tokenizer import Tokenizer, load_tokenizer

FLUSH = 1 << 18  # tokens gathered before they are handed on
REPORTED_BAD = 20  # bad documents a job describes; more are only counted


@dataclass(frozen=True)
class Setup:
    """What a worker needs to know. tokenizer: path of a tokenizer.json; dtype: of the ids.

    Documents marked BY_RULE go to validation when their hash is below `threshold`; if the source is one such
    document, `cut` is the share of its end that does.
    """

    files: list[File]
    text_key: str
    task: Literal["encode", "characters"]
    threshold: int = 0
    cut: float = 0.0
    tokenizer: str = ""
    dtype: str = "<u2"


@dataclass
class Summary:
    """What a job found. documents, bytes (of UTF-8 text): train, validation. pieces: documents, with each
    span of a long text counted as one. low, high: hashes of the documents that were split by rule. read:
    bytes of the files. characters: the distinct ones, for the task `characters`."""

    documents: list[int] = field(default_factory=lambda: [0, 0])
    bytes: list[int] = field(default_factory=lambda: [0, 0])
    empty: int = 0
    pieces: int = 0
    bad_count: int = 0
    bad: list[Bad] = field(default_factory=list)
    low: int | None = None
    high: int | None = None
    read: int = 0
    characters: str = ""

    def add(self, other: Summary) -> None:
        self.documents = [a + b for a, b in zip(self.documents, other.documents, strict=True)]
        self.bytes = [a + b for a, b in zip(self.bytes, other.bytes, strict=True)]
        self.empty += other.empty
        self.pieces += other.pieces
        self.bad_count += other.bad_count
        self.bad = [*self.bad, *other.bad][:REPORTED_BAD]
        self.low = min((x for x in (self.low, other.low) if x is not None), default=None)
        self.high = max((x for x in (self.high, other.high) if x is not None), default=None)
        self.read += other.read
        if not set(other.characters) <= set(self.characters):
            self.characters = "".join(sorted(set(self.characters) | set(other.characters)))


class Part(NamedTuple):
    """Consecutive ids of one split."""

    split: int
    ids: np.ndarray


Work = Job | list[tuple[int, dict[str, Any]]]  # spans, or (number, row) of a streamed set


def run_job(work: Work, setup: Setup, tokenizer: Tokenizer | None) -> Iterator[Part | Summary]:
    """The ids of a job's documents in order, in parts of bounded size, then its Summary."""
    summary = Summary(read=sum(_read_size(setup.files, item) for item in work))
    waiting: list[list[np.ndarray]] = [[], []]
    sizes = [0, 0]
    for document in _documents(work, setup):
        summary.pieces += 1
        if isinstance(document, Bad):
            summary.bad_count += 1
            summary.bad = [*summary.bad, document][:REPORTED_BAD]
        elif setup.task == "characters":
            summary.characters = "".join(set(summary.characters).union(document.text))
        else:
            assert tokenizer is not None
            for split, text, end in _split(document, setup, summary):
                for ids in _encode(text, end, tokenizer, setup.dtype):
                    waiting[split].append(ids)
                    sizes[split] += len(ids)
                    if sizes[split] >= FLUSH:
                        yield Part(split, np.concatenate(waiting[split]))
                        waiting[split], sizes[split] = [], 0
    for split in (TRAIN, VAL):
        if sizes[split]:
            yield Part(split, np.concatenate(waiting[split]))
    yield summary


def training_texts(work: Work, setup: Setup) -> Iterator[str]:
    """The texts of a job's training documents; bad ones are left out."""
    for document in _documents(work, setup):
        if isinstance(document, Document):
            yield from (text for split, text, _ in _split(document, setup, Summary()) if split == TRAIN)


def _documents(work: Work, setup: Setup) -> Iterator[Document | Bad]:
    for item in work:
        if isinstance(item, Span):
            yield from read_span(setup.files, item, setup.text_key)
        else:
            yield document_of(0, *item, setup.text_key)


def _read_size(files: list[File], item: Any) -> int:
    if not isinstance(item, Span):
        return len(str(item[1]))
    if files[item.file].kind == "parquet":
        return files[item.file].size // max(1, item.high)
    return item.stop - item.start


def _split(document: Document, setup: Setup, summary: Summary) -> Iterator[tuple[int, str, bool]]:
    """(split, text, an end token follows) of a document: one, or two where a single document is cut."""
    _, _, text, split, begins, ends = document
    if split == BY_RULE and not text:
        summary.empty += 1
        return
    parts = [(split, text, ends)]
    if split == BY_RULE and setup.cut:
        at = int(len(text) * (1 - setup.cut))
        parts = [(TRAIN, text[:at], False), (VAL, text[at:], False)]
    elif split == BY_RULE:
        number = document_hash(setup.files[document.file].name, document.place)
        summary.low = number if summary.low is None else min(summary.low, number)
        summary.high = number if summary.high is None else max(summary.high, number)
        parts = [(VAL if number < setup.threshold else TRAIN, text, ends)]
    summary.documents[parts[0][0]] += begins
    for part in parts:
        summary.bytes[part[0]] += len(part[1].encode())
        yield part


def _encode(text: str, end: bool, tokenizer: Tokenizer, dtype: str) -> Iterator[np.ndarray]:
    for start in range(0, len(text), SPAN):  # only rows of .jsonl and .parquet can be longer than a span
        yield tokenizer.encode_array(text[start : start + SPAN]).astype(dtype)
    if end:
        yield np.array([tokenizer.end_id], dtype)


def open_tokenizer(setup: Setup) -> Tokenizer | None:
    return load_tokenizer(Path(setup.tokenizer)) if setup.tokenizer else None


# The worker process. On stdin: a line with the setup, then one line a job; on stdout: for each job its parts
# (a line [split, count] and the ids), then its summary as a line. JSON and raw arrays: nothing is unpickled.


def to_line(value: Any) -> bytes:
    return json.dumps(value).encode("ascii") + b"\n"


def setup_from(value: dict[str, Any]) -> Setup:
    return Setup(**{**value, "files": [File(f[0], Path(f[1]), f[2], f[3]) for f in value["files"]]})


def setup_to(setup: Setup) -> dict[str, Any]:
    return {**vars(setup), "files": [[f.name, str(f.path), f.kind, f.size] for f in setup.files]}


def summary_from(value: dict[str, Any]) -> Summary:
    return Summary(**{**value, "bad": [Bad(*b) for b in value["bad"]]})


def worker() -> None:
    """Entry point of a worker process; ends when stdin does, or when the reader of stdout has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it ends the workers
    setup = setup_from(json.loads(sys.stdin.buffer.readline()))
    tokenizer = open_tokenizer(setup)
    ready: queue.Queue[bytes | None] = queue.Queue(
        maxsize=32
    )  # so that work goes on while the parent is busy
    writer = threading.Thread(target=_write_all, args=(ready,), daemon=True)
    writer.start()
    for line in sys.stdin.buffer:
        kind, items = json.loads(line)
        work: Work = [Span(*i) for i in items] if kind == "spans" else [(n, row) for n, row in items]
        for result in run_job(work, setup, tokenizer):
            if isinstance(result, Part):
                ready.put(to_line([result.split, len(result.ids)]) + result.ids.tobytes())
            else:
                ready.put(to_line(asdict(result)))
    ready.put(None)
    writer.join()


def _write_all(ready: queue.Queue[bytes | None]) -> None:
    try:
        while (block := ready.get()) is not None:
            sys.stdout.buffer.write(block)
            sys.stdout.buffer.flush()
    except BrokenPipeError:
        import os

        os._exit(0)
