"""What a rank does and holds over one step. No torch.

Computing and messages are a list of spans: what the rank computes, when it waits, and its messages, each on the lane of
its axis. They are measured (`step/recorder.py`) or simulated (`simulate`, with the planner's prices). Bytes of tensors
are those of categories, with the phases of the step: measured in a run or on tensors without memory
(`trace/memory.Tracker`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, islice
from math import inf
from typing import Any, NamedTuple

COMPUTE = "compute"
"""The lane of what the rank computes. Others are axes."""
KINDS = ("forward", "backward", "update", "other")
WAIT, MESSAGE = "wait", "message"
UPDATE = "update"
"""The lane of updates on the host, beside what the rank computes."""


class Span(NamedTuple):
    """From `start` to `end`, in seconds since the step began. kind: on the compute lane one of KINDS, or "wait" for the
    message of this name; else "message", or "update" on the host. bytes: that offload reads or writes."""

    lane: str
    kind: str
    name: str
    start: float
    end: float
    bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def until(self, end: float) -> Span:
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
        return sum(end - start for start, end in self._messages(lane))

    def overlapped(self, lane: str | None = None) -> float:
        """Seconds in which the rank computes while some message (of an axis) is under way."""
        computed = _union((s.start, s.end) for s in self.of(COMPUTE) if s.kind != WAIT)
        messages, common, i, j = self._messages(lane), [], 0, 0
        while i < len(messages) and j < len(computed):  # both are in order and without overlap
            start, end = max(messages[i][0], computed[j][0]), min(messages[i][1], computed[j][1])
            if start < end:
                common.append(end - start)
            if messages[i][1] < computed[j][1]:
                i += 1
            else:
                j += 1
        return sum(common)

    def hidden(self, lane: str | None = None) -> float:
        """Share of the time of messages in which the rank computes, 0..1; 1 without messages."""
        under_way = self.under_way(lane)
        return self.overlapped(lane) / under_way if under_way else 1.0

    @property
    def waited(self) -> float:
        """Seconds in which the rank waits for messages."""
        return sum(span.seconds for span in self.waits)

    @property
    def waits(self) -> list[Span]:
        return [span for span in self.spans if span.kind == WAIT]

    @property
    def busy(self) -> float:
        """Share of the step in which the rank computes."""
        return self.utilisation(1)[0]

    def utilisation(self, parts: int) -> list[float]:
        """Share of each of so many equal parts of the step in which the rank computes, 0..1."""
        width, found = self.seconds / parts or 1.0, [0.0] * parts
        for span in (span for span in self.of(COMPUTE) if span.kind != WAIT):
            for part in range(int(span.start / width), parts):
                if span.end <= part * width:
                    break
                found[part] += (min(span.end, (part + 1) * width) - max(span.start, part * width)) / width
        return found

    def _messages(self, lane: str | None) -> list[tuple[float, float]]:
        return _union((s.start, s.end) for s in self.spans if s.kind == MESSAGE and lane in (None, s.lane))

    def as_json(self) -> dict[str, Any]:
        facts = {"rank": self.rank, "step": self.step, "spans": [list(span) for span in self.spans]}
        return facts | {"seconds": self.seconds, "waited_s": self.waited, "hidden": self.hidden()}

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> StepTimeline:
        return cls(tuple(Span(*span) for span in facts["spans"]), facts["rank"], facts["step"])


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times, without overlap, in order."""
    union: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(end, union[-1][1])
        else:
            union.append((start, end))
    return union


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
    work = [part for part in work if part.seconds > 0]
    messages = [message for message in messages if message.seconds > 0]
    ends = list(accumulate(part.seconds for part in work))
    close = 1e-12 * ends[-1] if ends else 0.0
    queues: dict[str, deque[int]] = {}
    for number, message in enumerate(messages):
        assert message.ready <= message.needed + close, f"{message} is needed before it is ready"
        queues.setdefault(message.queue or message.lane, deque()).append(number)
    needs = deque(sorted((message.needed, number) for number, message in enumerate(messages)))
    flying: dict[str, tuple[int, float]] = {}  # by queue: (message, its end)
    arrived, computed, sent = set[int](), list[Span](), list[Span]()
    at, done, now = 0, 0.0, 0.0  # the part of the work, seconds of work behind us, the time
    while at < len(work) or len(arrived) < len(messages):
        for name, queue in queues.items():
            if name not in flying and queue and messages[queue[0]].ready <= done + close:
                number = queue.popleft()
                message = messages[number]
                flying[name] = number, now + message.seconds
                sent.append(Span(message.lane, MESSAGE, message.name, now, now + message.seconds))
        while needs and needs[0][1] in arrived:
            needs.popleft()
        begun, arrives = now, min((end for _, end in flying.values()), default=inf)
        if at == len(work) or (needs and needs[0][0] <= done + close):
            assert flying, f"{messages[needs[0][1]]} stands behind one that is ready later"
            now, kind, name = arrives, WAIT, messages[needs[0][1]].name
        else:
            rate = 1 - max((messages[number].held for number, _ in flying.values()), default=0.0)
            ready = [messages[q[0]].ready for name, q in queues.items() if q and name not in flying]
            stop = min([ends[at], *ready, *(needed for needed, _ in islice(needs, 1))])
            took = (stop - done) / rate if rate else inf
            if now + took <= arrives:
                now, done = now + took, stop
            else:
                done, now = done + (arrives - now) * rate, arrives
            kind, name = work[at].kind, work[at].name
            at += done >= ends[at] - close
        if computed and (computed[-1].kind, computed[-1].name) == (kind, name):  # what goes on is one span
            computed[-1] = computed[-1]._replace(end=now)
        elif now > begun:
            computed.append(Span(COMPUTE, kind, name, begun, now))
        landed = [queue for queue, (_, end) in flying.items() if end <= now]
        arrived.update(flying.pop(queue)[0] for queue in landed)
    return StepTimeline((*computed, *sent))


def exposed_in_pieces(seconds: float, held: float, beside: float, pieces: int) -> float:
    """What messages of `seconds`, in equal pieces, add to `beside` seconds of work, of which each part makes a piece
    ready; or, the same backwards, waits for one. held: seconds of them in which the processor copies. It is what
    `simulate` finds.

    The first or the last piece overlaps with nothing. The others take from the work what they hold the processor for,
    or all of them together longer than it.
    """
    others = 1 - 1 / pieces
    return max(seconds - beside * others, seconds / pieces + held * others)


CATEGORIES = {
    "params": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "buffers": "messages and other buffers",
}
"""The categories of memory, with their names in pictures. The planner predicts them (`fivefold_plan/memory/memory.py`),
and the tracker measures them."""
AWAY = {"host": "host memory", "disk": "files on disk"}
"""Where `layout.offload` keeps what it takes off the device; no sum counts it. A CPU's own memory is not a host's."""
BINS = 240
"""Parts of a step of which the largest sum is kept."""


class Phase(NamedTuple):
    """What the rank does from `start` to `end`: one of KINDS."""

    kind: str
    start: float
    end: float


class Change(NamedTuple):
    """Bytes more, or less, of a category at a time."""

    at: float
    category: str
    size: int


@dataclass(frozen=True)
class MemoryTimeline:
    """One step of a rank.

    bytes: of each category, in equal parts of the step; each part shows the moment with most bytes in it. So the step's
    peak is exact. length: of the step, in `unit`: "s", or "changes" (tensors allocated or freed) if no time passed.
    away: the most bytes in each part of the step, of those of AWAY that the step has.
    """

    bytes: dict[str, tuple[int, ...]]
    phases: tuple[Phase, ...]
    length: float
    unit: str
    rank: int = 0
    step: int = 0
    away: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def totals(self) -> list[int]:
        return [sum(sizes) for sizes in zip(*self.bytes.values(), strict=True)]

    @property
    def peak(self) -> int:
        return max(self.totals, default=0)

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes of each category when the sum is largest."""
        number = self.totals.index(self.peak)
        return {name: sizes[number] for name, sizes in self.bytes.items()}

    def phase_at(self, share: float) -> str:
        """The phase at a share of the step, 0..1."""
        at = share * self.length
        return next((phase.kind for phase in self.phases if phase.start <= at < phase.end), "other")

    @property
    def peak_phase(self) -> str:
        totals = self.totals
        return self.phase_at((totals.index(max(totals)) + 0.5) / len(totals)) if totals else "other"

    def as_json(self) -> dict[str, Any]:
        facts = asdict(self) | {"peak_bytes": self.peak, "at_peak": self.at_peak}
        return {name: fact for name, fact in facts.items() if fact != {}}

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> MemoryTimeline:
        return cls(
            {name: tuple(facts["bytes"][name]) for name in CATEGORIES},
            tuple(Phase(*phase) for phase in facts["phases"]),
            facts["length"], facts["unit"], facts["rank"], facts["step"],
            {name: tuple(sizes) for name, sizes in facts.get("away", {}).items()},
        )  # fmt: skip


def of_changes(
    changes: Iterable[Change], phases: Sequence[Phase], length: float, unit: str, rank: int = 0, step: int = 0
) -> MemoryTimeline:
    """The timeline of changes in order of time."""
    now, total, part = dict.fromkeys((*CATEGORIES, *AWAY), 0), 0, 0
    away = {name: [0] * BINS for name in AWAY}
    # Of each part: the largest sum, and what it is made of
    largest: list[tuple[float, dict[str, int]]] = [(-inf, now)] * BINS
    width = length / BINS or 1.0

    def note() -> None:
        for name, sizes in away.items():
            sizes[part] = max(sizes[part], now[name])
        if total > largest[part][0]:
            largest[part] = total, dict(now)

    for change in changes:
        # A part without changes shows what was there before it
        while part < min(BINS - 1, int(change.at / width)):
            part += 1
            note()
        now[change.category] += change.size
        total += change.size * (change.category in CATEGORIES)
        note()
    while part < BINS - 1:
        part += 1
        note()
    return MemoryTimeline(
        {name: tuple(sizes[name] for _, sizes in largest) for name in CATEGORIES},
        tuple(phases), length, unit, rank, step,
        {name: tuple(sizes) for name, sizes in away.items() if any(sizes)},
    )  # fmt: skip
