"""Turns tasks (spans, blocks or rows) into token ids, in worker processes on all cores.

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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from fivefold.data.conversations import Message, NotAConversation
from fivefold.data.kinds import Bad, Block, Document, Fields, File, FileSpan, Row, Task, kind_of, read_task
from fivefold.data.kinds.kind import BY_RULE, SPAN, TRAIN, VAL
from fivefold.data.tasks import document_hash
from fivefold.data.tokenizer import Tokenizer, load_tokenizer
from fivefold.data.tokens import COUNTED, ENDS
from fivefold.errors import UserError

if TYPE_CHECKING:
    from fivefold.data.chat import ChatTemplate, Encoded

FLUSH = 1 << 18  # tokens gathered before they are passed on
REPORTED_BAD = 20  # bad documents that a task describes; further ones are only counted


@dataclass(frozen=True)
class Setup:
    """Settings of a worker. tokenizer: path of a tokenizer.json. dtype: that of the ids.

    Documents marked BY_RULE go to validation if their hash is below `threshold`. If the source is one such document,
    the share `cut` at its end goes to validation. template: the Jinja text for conversations; "": all rows are texts.
    """

    files: list[File]
    text_key: str
    mode: Literal["encode", "characters"]
    threshold: int = 0
    cut: float = 0.0
    tokenizer: str = ""
    dtype: str = "<u2"
    template: str = ""


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
    """Consecutive ids of one split, and their flags (uint8) if some rows may be conversations."""

    split: int
    ids: np.ndarray
    flags: np.ndarray | None = None


class Encoder(NamedTuple):
    """What turns documents into ids. template: for conversations."""

    tokenizer: Tokenizer
    template: ChatTemplate | None = None


class _Waiting:
    """Ids of one split (and their flags) that are not passed on yet."""

    def __init__(self, split: int):
        self.split, self.size = split, 0
        self.ids: list[np.ndarray] = []
        self.flags: list[np.ndarray] = []

    def add(self, ids: np.ndarray, flags: np.ndarray | None) -> Iterator[Chunk]:
        self.ids.append(ids)
        self.size += len(ids)
        if flags is not None:
            self.flags.append(flags)
        if self.size >= FLUSH:
            yield from self.flush()

    def flush(self) -> Iterator[Chunk]:
        if self.size:
            flags = np.concatenate(self.flags) if self.flags else None
            yield Chunk(self.split, np.concatenate(self.ids), flags)
        self.ids, self.flags, self.size = [], [], 0


def run_task(task: Task, setup: Setup, encoder: Encoder | None) -> Iterator[Chunk | Summary]:
    """The ids of a task's documents in order, in chunks of bounded size, then the task's Summary."""
    summary = Summary(read=sum(_read_size(setup.files, item) for item in task))
    waiting = [_Waiting(TRAIN), _Waiting(VAL)]
    for document in _documents(task, setup):
        summary.pieces += 1
        if isinstance(document, Document) and document.messages is not None and encoder is not None:
            document = _rendered(document, document.messages, encoder)
        if isinstance(document, Bad):
            summary.bad_count += 1
            summary.bad = [*summary.bad, document][:REPORTED_BAD]
        elif isinstance(document, _Conversation):
            for split, _, end in _split(document.document, setup, summary):
                yield from waiting[split].add(*document.tokens(end, encoder, setup.dtype))
        elif setup.mode == "characters":
            summary.characters = "".join(set(summary.characters).union(*_characters(document, setup)))
        else:
            assert encoder is not None
            for split, text, end in _split(document, setup, summary):
                for ids, last in _encode(text, end, encoder.tokenizer, setup.dtype):
                    flags = None if encoder.template is None else np.full(len(ids), COUNTED, np.uint8)
                    if flags is not None and last:
                        flags[-1] |= ENDS
                    yield from waiting[split].add(ids, flags)
    for each in waiting:
        yield from each.flush()
    yield summary


class _Conversation(NamedTuple):
    document: Document
    encoded: Encoded

    def tokens(self, end: bool, encoder: Encoder | None, dtype: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids and flags. An end token follows, which does not count."""
        assert encoder is not None
        assert end, "rows are whole documents"
        ids = np.append(self.encoded.ids, encoder.tokenizer.end_id).astype(dtype)
        flags = np.append(self.encoded.counted * np.uint8(COUNTED), np.uint8(ENDS))
        return ids, flags.astype(np.uint8)


def _rendered(document: Document, messages: list[Message], encoder: Encoder) -> _Conversation | Bad:
    assert encoder.template is not None
    try:
        return _Conversation(document, encoder.template.encode(messages))
    except (NotAConversation, UserError) as error:
        return Bad(document.file, document.place, str(error))


def _characters(document: Document, setup: Setup) -> list[str]:
    """Texts that hold all characters of a document, also of its rendered form."""
    roles = [str(message["role"]) for message in document.messages or ()]
    return [document.text, *([setup.template, *roles, *map(str.title, roles)] if roles else [])]


def training_texts(task: Task, setup: Setup) -> Iterator[str]:
    """The texts of a task's training documents, without bad ones."""
    for document in _documents(task, setup):
        if isinstance(document, Document):
            yield from (text for split, text, _ in _split(document, setup, Summary()) if split == TRAIN)


def _documents(task: Task, setup: Setup) -> Iterator[Document | Bad]:
    return read_task(task, setup.files, Fields(setup.text_key, bool(setup.template)))


def _read_size(files: list[File], item: Any) -> int:
    if isinstance(item, Block):
        return len(item.content)
    if isinstance(item, Row):
        return len(str(item.value))
    if not kind_of(files[item.file]).by_bytes:
        return files[item.file].size * (item.stop - item.start) // max(1, item.high)
    return item.stop - item.start


def _split(document: Document, setup: Setup, summary: Summary) -> Iterator[tuple[int, str, bool]]:
    """(split, text, whether an end token follows) for a document, or for both parts of one that is cut."""
    text, split, begins, ends = document.text, document.split, document.begins, document.ends
    if split == BY_RULE and not text:
        summary.empty += 1
        return
    parts = [(split, text, ends)]
    if split == BY_RULE and setup.cut and document.messages is None:
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


def _encode(text: str, end: bool, tokenizer: Tokenizer, dtype: str) -> Iterator[tuple[np.ndarray, bool]]:
    """The ids of a text in pieces; True for the one that ends a document."""
    for start in range(0, len(text), SPAN):  # rows of .jsonl and .parquet can be longer than a span
        yield tokenizer.encode_array(text[start : start + SPAN]).astype(dtype), False
    if end:
        yield np.array([tokenizer.end_id], dtype), True


def open_encoder(setup: Setup) -> Encoder | None:
    if not setup.tokenizer:
        return None
    tokenizer = load_tokenizer(Path(setup.tokenizer))
    if not setup.template:
        return Encoder(tokenizer)
    from fivefold.data.chat import ChatTemplate  # Jinja takes a moment to import

    return Encoder(tokenizer, ChatTemplate(setup.template, tokenizer))


# A worker reads a line with the setup and then one line per task from stdin, behind it the bytes of blocks. For each
# task it writes its chunks to stdout (a line [split, count, flagged], then the ids, then perhaps their flags) and its
# summary as a line. It is JSON and raw bytes; nothing is pickled.


def to_line(value: Any) -> bytes:
    return (
        json.dumps(value, default=str).encode("ascii") + b"\n"
    )  # rows of tables hold dates, as a template shows them


ITEMS: dict[str, type[FileSpan] | type[Block] | type[Row]] = {"spans": FileSpan, "blocks": Block, "rows": Row}


def task_to(task: Task) -> list[bytes]:
    """A task as what is written."""
    kind = next(name for name, item in ITEMS.items() if isinstance(task[0], item))
    contents = [item.content for item in task if isinstance(item, Block)]
    items = [(*item[:-1], len(item.content)) if isinstance(item, Block) else item for item in task]
    return [to_line([kind, items]), *contents]


def task_from(line: bytes, read: Callable[[int], bytes]) -> Task:
    kind, items = json.loads(line)
    if kind == "blocks":
        return [Block._make((*item[:-1], read(item[-1]))) for item in items]
    return [Row._make(item) for item in items] if kind == "rows" else [FileSpan(*item) for item in items]


def setup_from(value: dict[str, Any]) -> Setup:
    return Setup(**{**value, "files": [File(f[0], Path(f[1]), *f[2:]) for f in value["files"]]})


def setup_to(setup: Setup) -> dict[str, Any]:
    return {**vars(setup), "files": [[f.name, str(f.path), *f[2:]] for f in setup.files]}


def summary_from(value: dict[str, Any]) -> Summary:
    return Summary(**{**value, "bad": [Bad(*b) for b in value["bad"]]})


def worker() -> None:
    """Entry point of a worker process. It ends with stdin, or when the reader of stdout is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends the workers
    setup = setup_from(json.loads(sys.stdin.buffer.readline()))
    encoder = open_encoder(setup)
    ready: queue.Queue[bytes | None] = queue.Queue(
        maxsize=32
    )  # lets the worker continue while the parent is busy
    writer = threading.Thread(target=_write_all, args=(ready,), daemon=True)
    writer.start()
    while line := sys.stdin.buffer.readline():
        task = task_from(line, sys.stdin.buffer.read)
        for result in run_task(task, setup, encoder):
            if isinstance(result, Chunk):
                flags = b"" if result.flags is None else result.flags.tobytes()
                head = [result.split, len(result.ids), result.flags is not None]
                ready.put(to_line(head) + result.ids.tobytes() + flags)
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
        encoder = open_encoder(setup)
        for task in tasks:
            yield from run_task(task, setup, encoder)
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
                stdin = self.processes[self.fed % len(self.processes)].stdin
                assert stdin is not None
                stdin.writelines(task_to(task))
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
        split, length, flagged = head
        raw = process.stdout.read(length * np.dtype(dtype).itemsize)
        flags = np.frombuffer(process.stdout.read(length), np.uint8) if flagged else None
        yield Chunk(split, np.frombuffer(raw, dtype), flags)
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
