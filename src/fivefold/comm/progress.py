"""What this rank has begun, what it waits for, and since when: notes that every message leaves, for `watchdog.py`; and
its names in the trace of PyTorch's profiler (`observe.profile_steps`).

Only memory of this process is written: two attributes and a dict per message, about half a microsecond. The watchdog's
thread reads them once a second.

`progress.watch` is a `Watch` while a step is measured (step/recorder.py), otherwise None: then each message costs one
look at it. It notes when messages begin and end, and when the step waits for them. Only messages that begin on the
watched thread are noted. (Rounds of a sum that another thread drives are part of that sum.)
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from time import perf_counter
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch.profiler import record_function

from fivefold.launch.verdict import backend_words
from fivefold.schedules.timelines import COMPUTE, MESSAGE, WAIT, Span

if TYPE_CHECKING:
    import torch.distributed as dist

LONGER = 10.0
"""Work that ranks do apart, such as saving or compiling, may take so many times as long as a message."""
USUAL = 31  # steps whose longest, but for a tenth, is the usual one
FRAMES = 12  # of a rank's last known place
Waiting = tuple["Label | None", str, "Ops | None", int, tuple[int, ...], "Place | None"]
"""What a thread waits for: axis, operation, its group and number there, the other ends of a send or receive (by index),
and where it began if it is waited for elsewhere. No axis: the device."""


class Label(Protocol):
    """What names a message: its axis, the ranks on it, and what it is for (`Axis`)."""

    name: str
    ranks: tuple[int, ...]
    purpose: str


class Named:
    """Ranks that are waited for without a process group: it is being made, or other threads receive the messages."""

    def __init__(self, name: str, ranks: Iterable[int]):
        self.name, self.ranks, self.purpose = name, tuple(ranks), ""


class Ops:
    """The collectives that this rank has begun over a process group. All its ranks begin them in one order, so a
    number names one of them on every rank."""

    __slots__ = ("begun", "group")

    def __init__(self, group: str):
        self.group, self.begun = group, 0


@dataclass
class Window:
    """Seconds of this rank since it last shared them: all, in messages, for data, and beside the steps."""

    began: float
    steps: int = 0
    messages: float = 0.0
    data: float = 0.0
    apart: float = 0.0


class Progress:
    """Notes of one process. moved: grows with everything that gets done. main: the thread that trains. usual_s: seconds
    of a usual step. role: what this rank is called beside its number. serving: other threads whose work ranks wait for.
    overseen: ranks that this one watches though it need not wait for them. profiling: a profiler records this process.
    watch: of the step that is measured."""

    def __init__(self) -> None:
        self.moved, self.groups, self.profiling = 0, dict[str, Ops](), False
        self.watch: Watch | None = None
        # share of the time that the network held up messages, and to whom (`watchdog.Sending`)
        self.sending: tuple[float, int] = 0.0, 0
        self.start()

    def start(self) -> None:
        """A run begins in this thread."""
        self.main, self.step, self.usual_s = get_ident(), 0, 0.0
        self.waits: dict[int, Waiting] = {}
        self.phases: list[tuple[str, float]] = []
        self.steps: deque[float] = deque(maxlen=USUAL)
        self.role, self.serving, self.overseen = "", set[int](), frozenset[int]()
        self.window = Window(perf_counter())

    def ops(self, group: dist.ProcessGroup, beside: bool = False) -> Ops:
        """beside: of the sums that a thread drives, each of which is many messages."""
        name = f"{group.group_name}/beside" if beside else group.group_name
        return self.groups.setdefault(name, Ops(name))

    def enter(self, waiting: Waiting) -> float:
        """This thread waits from now on. Returns the time, for `leave`."""
        self.moved += 1
        self.waits[get_ident()] = waiting
        return perf_counter()

    def leave(self, began: float) -> None:
        thread = get_ident()
        self.waits.pop(thread, None)
        self.moved += 1
        if thread == self.main and not self.phases:
            self.window.messages += perf_counter() - began

    @contextmanager
    def waits_in(self, waiting: Waiting) -> Iterator[None]:
        """This thread waits inside the block."""
        began = self.enter(waiting)
        try:
            yield
        finally:
            self.leave(began)

    def joining(self, ranks: Sequence[int]) -> AbstractContextManager[None]:
        """These ranks make a process group together inside the block."""
        name = f"new {sorted(ranks)}"
        ops = self.groups.setdefault(name, Ops(name))
        ops.begun += 1
        return self.waits_in((Named("new", ranks), "new_group", ops, ops.begun, (), None))

    def expect(self, what: str, axis: Named) -> float:
        """This thread waits for one of these ranks from now on, until `leave`. Called again meanwhile, it counts as
        nothing that gets done."""
        thread = get_ident()
        self.moved += thread not in self.waits
        self.waits[thread] = axis, what, None, 0, tuple(range(len(axis.ranks))), None
        return perf_counter()

    @contextmanager
    def serves(self) -> Iterator[None]:
        """This thread does work that ranks wait for."""
        thread = get_ident()
        self.serving.add(thread)
        try:
            yield
        finally:
            self.serving.discard(thread)

    def rest(self) -> AbstractContextManager[None]:
        """This thread, which serves, has nothing to do inside the block."""
        return self.waits_in((None, "rest", None, 0, (), None))

    def mark(self) -> None:
        """Something got done that is no message."""
        self.moved += 1

    def get_on(self) -> None:
        """A phase gets on, perhaps in another thread: bytes that are written or read."""
        if self.phases:
            self.moved += 1

    @contextmanager
    def phase(self, name: str, patience: float = LONGER) -> Iterator[None]:
        """Work that this rank does while others may wait for it. patience: how many times as long as for a message they
        wait."""
        self.phases.append((name, patience))
        self.moved += 1
        began = perf_counter()
        try:
            yield
        finally:
            self.phases.remove((name, patience))
            self.moved += 1
            if not self.phases:
                self.window.apart += perf_counter() - began

    def end_step(self, step: int, seconds: float, data_s: float) -> None:
        """A step is done. data_s: waited for its batch. The first one, which compiles, is usual until the second."""
        self.step = step
        self.moved += 1
        if self.usual_s:
            self.steps.append(seconds)
        self.usual_s = sorted(self.steps)[int(0.9 * len(self.steps))] if self.steps else seconds
        self.window.steps += 1
        self.window.data += data_s

    def share(self) -> tuple[float, ...]:
        """This rank's `observe.faults.SECONDS` per step since the last call."""
        now, window, (sending, to) = perf_counter(), self.window, self.sending
        self.window, steps = Window(now), max(1, window.steps)
        passed = now - window.began - window.apart
        computed = max(0.0, passed - window.messages - window.data)
        return (
            computed / steps,
            window.data / steps,
            window.messages / steps,
            sending * passed / steps,
            float(to),
        )

    def places(self, thread: int | None = None) -> list[str]:
        """Where a thread is (None: the one that trains), innermost first."""
        frame, found = sys._current_frames().get(self.main if thread is None else thread), list[str]()
        while frame is not None and len(found) < FRAMES:
            found.append(f"{Place(frame.f_code, frame.f_lasti)} in {frame.f_code.co_name}")
            frame = frame.f_back
        return found


progress = Progress()
"""Of this process."""


ROOM = str(Path(__file__).parent)
PACKAGE = Path(__file__).parents[1]
BACKENDS = ("gloo", "nccl", "timed out", "timeout", "connection", "peer", "socket")
"""Words in the errors of a backend. An error without any of them is a wrong call, and is not changed."""
WRONG = ("processgroupgloo::", "enforce fail", "invalid")
"""Words of a backend that refuses a wrong call: no rank is lost."""


class Place(NamedTuple):
    """A line of a function. The line is looked up only when needed: the lookup takes longer than a small message."""

    code: CodeType
    instruction: int

    def __str__(self) -> str:
        """`fivefold/step/step.py:148`. Files outside the package have their whole path."""
        lines = (line for start, end, line in self.code.co_lines() if start <= self.instruction < end)
        file = Path(self.code.co_filename)
        shown = file.relative_to(PACKAGE.parent) if file.is_relative_to(PACKAGE) else file
        return f"{shown}:{next(lines, self.code.co_firstlineno)}"


def caller() -> Place:
    """The innermost line outside of this folder."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(ROOM):
        frame = frame.f_back
    assert frame is not None
    return Place(frame.f_code, frame.f_lasti)


def verdict(
    what: str, timeout_s: float, waited: Place, started: Place | None, error: RuntimeError
) -> str | None:
    """The error text for a message, `what`, that raised `error` at `waited`. None: the call is wrong."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
    low = text.lower()
    if any(word in low for word in WRONG) or not any(word in low for word in BACKENDS):
        return None
    place = str(waited)
    if started is not None and str(started) != place:
        place = f"{started}, waited for at {place}"
    if "timed out" in low or "timeout" in low:
        said = f"timed out after {timeout_s:g} s: not all of these ranks took part"
    else:
        said = "failed: one of these ranks has ended, or cannot be reached"
    return f"{what}, at {place}, {said}. The backend said: {backend_words(error)}"


NOTHING = nullcontext()


def span(*words: object) -> AbstractContextManager[object]:
    """Inside the block, the profiler's trace has a range with this name. It costs one look while none records."""
    return record_function(" ".join(map(str, words))) if progress.profiling else NOTHING


def message(operation: str, axis: Label, wait: bool = False) -> AbstractContextManager[object]:
    """The range of a message: of its start, or of a wait for it."""
    if not progress.profiling:
        return NOTHING
    begin, purpose = "wait for " * wait, f", {axis.purpose}" * bool(axis.purpose)
    return record_function(f"{begin}{operation} over {axis.name}{purpose}")


UNIT = "FSDP2 unit"
"""Begins the purpose of a unit's messages; timelines leave it out."""


class Work(Protocol):
    """What a message is waited for by. It raises the backend's error."""

    def wait(self) -> Any: ...


class Handle:
    """A `Work` out of a function that waits."""

    def __init__(self, wait: Callable[[], object]):
        self.wait = wait


AT_ONCE = 2e-5  # seconds of a wait for I/O that is over already


class Watch:
    """The messages and waits of this thread, in seconds since `began`. Messages are named by their operation, what they
    are for (`Axis.purpose`), and what the rank computes when they begin (`during`). beside: what threads of offload
    read, write and update."""

    def __init__(self) -> None:
        self.began, self.during = perf_counter(), ""
        self.thread, self.spans, self.beside = get_ident(), list[Span](), list[Span]()

    def clock(self) -> float:
        return perf_counter() - self.began

    def note(self, lane: str, kind: str, name: str, since: float, size: int = 0) -> None:
        """Notes what any thread has done since a time of `perf_counter`. A wait counts in this thread, unless it was
        over at once."""
        span = Span(lane, kind, name, max(0.0, since - self.began), self.clock(), size)
        if kind != WAIT:
            self.beside.append(span)
        elif get_ident() == self.thread and span.seconds > AT_ONCE:
            self.spans.append(span)

    def follow(self, axis: Label, operation: str, work: Work | None, began: float) -> Work | None:
        """Wraps what a started message is waited for by. A thread waits for it and notes its end: some of gloo's can be
        waited for only once, so whoever else waits does so for the thread."""
        if work is None or get_ident() != self.thread:
            return work
        what = axis.purpose.removeprefix(f"{UNIT} ") or self.during
        name, number, done = f"{operation}, {what}" if what else operation, len(self.spans), Future[None]()
        self.spans.append(Span(axis.name, MESSAGE, name, began, -1.0))

        def run() -> None:
            failed: BaseException | None = None
            try:
                work.wait()
            except BaseException as error:
                failed = error
            self.spans[number] = self.spans[number].until(self.clock())
            done.set_result(None) if failed is None else done.set_exception(failed)

        def wait() -> None:
            since = self.clock()
            done.result()
            if get_ident() == self.thread:
                self.spans.append(Span(COMPUTE, WAIT, name, since, self.clock()))

        threading.Thread(target=run, daemon=True).start()
        return Handle(wait)

    def close(self) -> list[Span]:
        """All spans. Messages that are still under way end now."""
        now = self.clock()
        return [*(span if span.end >= 0 else span.until(now) for span in self.spans), *self.beside]
