"""Computing and messages of one rank over time, and how much of the messages computing hides. No torch.

A step is a list of spans: what the rank computes, when it waits, and its messages, each on the lane of its axis. It is
measured (`step/recorder.py`) or simulated (`simulate`, with the planner's prices).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

COMPUTE = "compute"
"""The lane of what the rank computes. Others are axes."""
KINDS = ("forward", "backward", "update", "other")
WAIT, MESSAGE = "wait", "message"


class Span(NamedTuple):
    """From `start` to `end`, in seconds since the step began. kind: on the compute lane one of KINDS, or "wait" for the
    message of this name; else "message"."""

    lane: str
    kind: str
    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def until(self, end: float) -> Span:
        """The span with another end."""
        return self._replace(end=end)


@dataclass(frozen=True)
class StepTimeline:
    """One step of a rank. spans: those of a lane in time order. The compute lane's do not overlap; messages of an axis
    may, if several are under way."""

    spans: tuple[Span, ...]
    rank: int = 0
    step: int = 0

    @property
    def seconds(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    @property
    def lanes(self) -> list[str]:
        """The compute lane, and the axes in the order of their first message."""
        return list(dict.fromkeys([COMPUTE, *(span.lane for span in self.spans)]))

    def of(self, lane: str) -> list[Span]:
        return [span for span in self.spans if span.lane == lane]

    def under_way(self, lane: str | None = None) -> float:
        """Seconds in which some message is under way (on an axis)."""
        return _length(self._messages(lane))

    def overlapped(self, lane: str | None = None) -> float:
        """Seconds in which the rank computes while some message (of an axis) is under way."""
        computed = _union((s.start, s.end) for s in self.of(COMPUTE) if s.kind != WAIT)
        return _length(_common(self._messages(lane), computed))

    def hidden(self, lane: str | None = None) -> float:
        """Share of the time of messages in which the rank computes, 0..1; 1 without messages."""
        under_way = self.under_way(lane)
        return self.overlapped(lane) / under_way if under_way else 1.0

    @property
    def waited(self) -> float:
        """Seconds in which the rank waits for messages."""
        return sum(span.seconds for span in self.spans if span.kind == WAIT)

    def _messages(self, lane: str | None) -> list[tuple[float, float]]:
        return _union((s.start, s.end) for s in self.spans if s.kind == MESSAGE and lane in (None, s.lane))

    def as_json(self) -> dict[str, Any]:
        return {"rank": self.rank, "step": self.step, "spans": [list(span) for span in self.spans]} | {
            "seconds": self.seconds,
            "waited_s": self.waited,
            "hidden": self.hidden(),
        }


def from_json(found: dict[str, Any]) -> StepTimeline:
    """The inverse of `StepTimeline.as_json`."""
    return StepTimeline(tuple(Span(*span) for span in found["spans"]), found["rank"], found["step"])


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times, without overlap, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _common(
    some: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """The times in both; each is in order and without overlap."""
    found, i, j = [], 0, 0
    while i < len(some) and j < len(others):
        start, end = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if start < end:
            found.append((start, end))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)


class Work(NamedTuple):
    """Something that a rank computes. kind: one of KINDS. seconds: without messages beside it."""

    kind: str
    name: str
    seconds: float


class Message(NamedTuple):
    """A message to be simulated. ready, needed: how many seconds of work are done before it may start, and before which
    the next work waits for its end. queue: messages with the same one go one after the other; "": those of the lane.
    held: the share of its time in which the processor copies, and cannot compute."""

    lane: str
    name: str
    seconds: float
    ready: float
    needed: float
    queue: str = ""
    held: float = 0.0


def simulate(work: Sequence[Work], messages: Sequence[Message]) -> StepTimeline:
    """Runs work in order, and messages beside it; those of a queue go one after the other, in the order given.

    Between local ranks the CPU itself copies and adds (`Message.held`), so work beside a message runs more slowly.
    """
    return _Run(work, messages)()


class _Run:
    """done: seconds of work behind us. now: the time."""

    def __init__(self, work: Sequence[Work], messages: Sequence[Message]):
        self.work = [one for one in work if one.seconds > 0]
        self.whole = sum(one.seconds for one in self.work)
        self.close = 1e-12 * self.whole
        self.queues: dict[str, deque[int]] = {}
        self.messages = [one for one in messages if one.seconds > 0]
        for number, one in enumerate(self.messages):
            assert one.ready <= one.needed + self.close, f"{one} is needed before it is ready"
            self.queues.setdefault(one.queue or one.lane, deque()).append(number)
        self.needs = [(one.needed, number) for number, one in enumerate(self.messages)]
        heapq.heapify(self.needs)
        self.flying: dict[str, tuple[int, float]] = {}  # by queue: (message, its end)
        self.arrived: set[int] = set()
        self.done = self.now = 0.0
        self.computed: list[Span] = []
        self.sent: list[Span] = []

    def __call__(self) -> StepTimeline:
        ends, behind = [], 0.0
        for one in self.work:
            behind += one.seconds
            ends.append(behind)
        at = 0
        while at < len(self.work) or len(self.arrived) < len(self.messages):
            self._start()
            while self.needs and self.needs[0][1] in self.arrived:
                heapq.heappop(self.needs)
            waits = bool(self.needs) and self.needs[0][0] <= self.done + self.close
            begun = self.now
            if waits or at == len(self.work):
                assert self.flying, f"{self.messages[self.needs[0][1]]} stands behind one that is ready later"
                self.now = min(end for _, end in self.flying.values())
                kind, name = WAIT, self.messages[self.needs[0][1]].name
            else:
                rate = 1 - max(
                    (self.messages[number].held for number, _ in self.flying.values()), default=0.0
                )
                stop = min(self._next_stop(), ends[at])
                arrives = min((end for _, end in self.flying.values()), default=float("inf"))
                took = (stop - self.done) / rate if rate else float("inf")
                if self.now + took <= arrives:
                    self.now, self.done = self.now + took, stop
                else:
                    self.done, self.now = self.done + (arrives - self.now) * rate, arrives
                kind, name = self.work[at].kind, self.work[at].name
                at += self.done >= ends[at] - self.close
            self._note(kind, name, begun)
            landed = [queue for queue, (_, end) in self.flying.items() if end <= self.now]
            self.arrived.update(self.flying.pop(queue)[0] for queue in landed)
        return StepTimeline((*self.computed, *self.sent))

    def _start(self) -> None:
        for name, queue in self.queues.items():
            if name not in self.flying and queue and self.messages[queue[0]].ready <= self.done + self.close:
                number = queue.popleft()
                one = self.messages[number]
                self.flying[name] = number, self.now + one.seconds
                self.sent.append(Span(one.lane, MESSAGE, one.name, self.now, self.now + one.seconds))

    def _next_stop(self) -> float:
        """The work done at which a message starts or is needed."""
        ready = [
            self.messages[queue[0]].ready
            for name, queue in self.queues.items()
            if queue and name not in self.flying
        ]
        return min([*ready, *(needed for needed, _ in self.needs[:1])], default=float("inf"))

    def _note(self, kind: str, name: str, begun: float) -> None:
        """Adds what the rank did until now; what goes on is one span."""
        last = self.computed[-1] if self.computed else None
        if last is not None and (last.kind, last.name) == (kind, name):
            self.computed[-1] = last.until(self.now)
        elif self.now > begun:
            self.computed.append(Span(COMPUTE, kind, name, begun, self.now))


def exposed_in_pieces(seconds: float, held: float, beside: float, pieces: int) -> float:
    """What messages of `seconds`, in equal pieces, add to `beside` seconds of work, of which each part makes a piece
    ready; or, the same backwards, waits for one. held: seconds of them in which the processor copies. It is what
    `simulate` finds.

    The first or the last piece overlaps with nothing. The others take from the work what they hold the processor for,
    or all of them together longer than it.
    """
    others = 1 - 1 / pieces
    return max(seconds - beside * others, seconds / pieces + held * others)
