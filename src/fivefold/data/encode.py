"""Turns tasks (spans of files, or rows of a streamed set) into token ids, in worker processes on all cores.

Workers are plain child processes behind pipes. Unlike multiprocessing's, they neither fork a process that may hold
threads nor import the user's main script again. Task j goes to worker j mod N, and results are read in the order of
tasks, so shards do not depend on timing. A worker that is ahead waits once its buffer is full, so memory is bounded.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fivefold.data.documents import Bad, Document, document_of, read_span
from fivefold.data.sources import File
from fivefold.data.tasks import BY_RULE, SPAN, TRAIN, VAL, FileSpan, Task, document_hash
from fivefold.data.tokenizer import Tokenizer, load_tokenizer
from fivefold.errors import UserError

FLUSH = 1 << 18  # tokens gathered before they are passed on
REPORTED_BAD = 20  # bad documents that a task describes; further ones are only counted


@dataclass(frozen=True)
class Setup:
    """Settings of a worker. tokenizer: path of a tokenizer.json. dtype: that of the ids.

    Documents marked BY_RULE go to validation if their hash is below `threshold`. If the source is one such document,
    the share `cut` at its end goes to validation.
    """

    files: list[File]
    text_key: str
    mode: Literal["encode", "characters"]
    threshold: int = 0
    cut: float = 0.0
    tokenizer: str = ""
    dtype: str = "<u2"


@dataclass
class Summary:
    """Counts of a task.

    documents, bytes (of UTF-8 text): for train and validation. pieces: documents, where each span of a long text counts
    as one. low, high: lowest and highest hash of documents split by rule. read: bytes of the files. characters: the
    distinct ones, for the mode `characters`.
    """

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


class Chunk(NamedTuple):
    """Consecutive ids of one split."""

    split: int
    ids: np.ndarray


def run_task(task: Task, setup: Setup, tokenizer: Tokenizer | None) -> Iterator[Chunk | Summary]:
    """The ids of a task's documents in order, in chunks of bounded size, then the task's Summary."""
    summary = Summary(read=sum(_read_size(setup.files, item) for item in task))
    waiting: list[list[np.ndarray]] = [[], []]
    sizes = [0, 0]
    for document in _documents(task, setup):
        summary.pieces += 1
        if isinstance(document, Bad):
            summary.bad_count += 1
            summary.bad = [*summary.bad, document][:REPORTED_BAD]
        elif setup.mode == "characters":
            summary.characters = "".join(set(summary.characters).union(document.text))
        else:
            assert tokenizer is not None
            for split, text, end in _split(document, setup, summary):
                for ids in _encode(text, end, tokenizer, setup.dtype):
                    waiting[split].append(ids)
                    sizes[split] += len(ids)
                    if sizes[split] >= FLUSH:
                        yield Chunk(split, np.concatenate(waiting[split]))
                        waiting[split], sizes[split] = [], 0
    for split in (TRAIN, VAL):
        if sizes[split]:
            yield Chunk(split, np.concatenate(waiting[split]))
    yield summary


def training_texts(task: Task, setup: Setup) -> Iterator[str]:
    """The texts of a task's training documents, without bad ones."""
    for document in _documents(task, setup):
        if isinstance(document, Document):
            yield from (text for split, text, _ in _split(document, setup, Summary()) if split == TRAIN)


def _documents(task: Task, setup: Setup) -> Iterator[Document | Bad]:
    for item in task:
        if isinstance(item, FileSpan):
            yield from read_span(setup.files, item, setup.text_key)
        else:
            yield document_of(0, *item, setup.text_key)


def _read_size(files: list[File], item: Any) -> int:
    if not isinstance(item, FileSpan):
        return len(str(item[1]))
    if files[item.file].kind == "parquet":
        return files[item.file].size // max(1, item.high)
    return item.stop - item.start


def _split(document: Document, setup: Setup, summary: Summary) -> Iterator[tuple[int, str, bool]]:
    """(split, text, whether an end token follows) for a document, or for both parts of one that is cut."""
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
    for start in range(0, len(text), SPAN):  # rows of .jsonl and .parquet can be longer than a span
        yield tokenizer.encode_array(text[start : start + SPAN]).astype(dtype)
    if end:
        yield np.array([tokenizer.end_id], dtype)


def open_tokenizer(setup: Setup) -> Tokenizer | None:
    return load_tokenizer(Path(setup.tokenizer)) if setup.tokenizer else None


# A worker reads a line with the setup and then one line per task from stdin. For each task it writes its chunks to
# stdout (a line [split, count], then the ids) and its summary as a line. It is JSON and raw arrays; nothing is pickled.


def to_line(value: Any) -> bytes:
    return json.dumps(value).encode("ascii") + b"\n"


def setup_from(value: dict[str, Any]) -> Setup:
    return Setup(**{**value, "files": [File(f[0], Path(f[1]), f[2], f[3]) for f in value["files"]]})


def setup_to(setup: Setup) -> dict[str, Any]:
    return {**vars(setup), "files": [[f.name, str(f.path), f.kind, f.size] for f in setup.files]}


def summary_from(value: dict[str, Any]) -> Summary:
    return Summary(**{**value, "bad": [Bad(*b) for b in value["bad"]]})


def worker() -> None:
    """Entry point of a worker process. It ends with stdin, or when the reader of stdout is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends the workers
    setup = setup_from(json.loads(sys.stdin.buffer.readline()))
    tokenizer = open_tokenizer(setup)
    ready: queue.Queue[bytes | None] = queue.Queue(
        maxsize=32
    )  # lets the worker continue while the parent is busy
    writer = threading.Thread(target=_write_all, args=(ready,), daemon=True)
    writer.start()
    for line in sys.stdin.buffer:
        kind, items = json.loads(line)
        task: Task = [FileSpan(*i) for i in items] if kind == "spans" else [(n, row) for n, row in items]
        for result in run_task(task, setup, tokenizer):
            if isinstance(result, Chunk):
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


MIN_PARALLEL = 4 << 20  # bytes of text; for less, starting processes costs more than it saves
COMMAND = [sys.executable, "-P", "-c", "from fivefold.data.encode import worker; worker()"]


def run(tasks: Iterable[Task], setup: Setup, workers: int) -> Iterator[Chunk | Summary]:
    """The results of all tasks in order: each task's chunks, then its summary. One worker runs in this process."""
    if workers <= 1:
        tokenizer = open_tokenizer(setup)
        for task in tasks:
            yield from run_task(task, setup, tokenizer)
        return
    processes = [_start(setup) for _ in range(workers)]
    feeder = _Feeder(tasks, processes)
    feeder.start()
    finished = 0
    try:
        while (yield from _results(processes[finished % workers], setup.dtype)):
            finished += 1
        _check_end(processes, feeder, finished)
    finally:
        _stop(processes, feeder)


def _start(setup: Setup) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parents[2])  # the worker must find the same package, installed or not
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        "TOKENIZERS_PARALLELISM": "false",  # one thread per worker
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert process.stdin is not None
    process.stdin.write(to_line(setup_to(setup)))
    return process


def _stop(processes: list[subprocess.Popen[bytes]], feeder: _Feeder) -> None:
    for process in processes:
        process.kill()
    feeder.join(timeout=10)  # it gets a broken pipe, unless it waits for the network
    for process in processes:
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


class _Feeder(threading.Thread):
    """A thread that hands out the tasks, because a pipe to a busy worker blocks.

    It never blocks forever. The worker it waits for has only unread results of tasks already handed out, and these get
    read.
    """

    def __init__(self, tasks: Iterable[Task], processes: list[subprocess.Popen[bytes]]):
        super().__init__(name="fivefold-feeder", daemon=True)
        self.tasks, self.processes = tasks, processes
        self.fed = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for task in self.tasks:
                kind = "spans" if isinstance(task[0], FileSpan) else "rows"
                stdin = self.processes[self.fed % len(self.processes)].stdin
                assert stdin is not None
                stdin.write(to_line([kind, task]))
                stdin.flush()
                self.fed += 1
        except BrokenPipeError:
            return  # the worker died or was stopped; the main thread sees that
        except BaseException as error:  # reading a streamed set may fail; the main thread raises this
            self.error = error
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def _results(process: subprocess.Popen[bytes], dtype: str) -> Iterator[Chunk | Summary]:
    """Yields the results of one task. Returns (through `yield from`) False if the worker has no more."""
    assert process.stdout is not None
    while line := process.stdout.readline():
        head: Any = json.loads(line)
        if isinstance(head, dict):
            yield summary_from(head)
            return True
        split, length = head
        raw = process.stdout.read(length * np.dtype(dtype).itemsize)
        yield Chunk(split, np.frombuffer(raw, dtype))
    return False


def _check_end(processes: list[subprocess.Popen[bytes]], feeder: _Feeder, finished: int) -> None:
    """Raises an error if the results ended before the tasks."""
    feeder.join(timeout=10)
    if feeder.error is not None:
        raise feeder.error
    if feeder.is_alive() or finished != feeder.fed or any(p.wait(10) for p in processes):
        with contextlib.suppress(
            subprocess.TimeoutExpired
        ):  # its output ends a moment before it has an exit code
            processes[finished % len(processes)].wait(10)
        codes = [p.poll() for p in processes]
        raise UserError(
            f"a tokenizing process died at task {finished + 1} (exit codes {codes}; -9 often means out of memory)"
        )
