"""How long a schedule takes, given what its actions cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fivefold.schedules.pipeline.action import Action, Kind
from fivefold.schedules.pipeline.dependencies import Result, makes, needs
from fivefold.schedules.pipeline.schedule import Schedule
from fivefold.schedules.pipeline.timeline import Event, Timeline

PerStage = float | Sequence[float]
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


@dataclass(frozen=True)
class Costs:
    """Seconds a microbatch: one number for all stages, or one for each.

    `backward` (B) is input + weight if it is not given. PyTorch's runtime does all of the first stage's backward
    in W: its input gradient is needed by nobody. `transfer`: from a computation's end until its result is on
    another rank; one number, or one for each (from rank, to rank). Transfers run beside computations and do not
    wait for each other.
    """

    forward: PerStage = 1.0
    input: PerStage = 1.0
    weight: PerStage = 1.0
    backward: PerStage | None = None
    transfer: float | Mapping[tuple[int, int], float] = 0.0

    def seconds(self, action: Action) -> float:
        """Duration of a computation."""
        if action.kind == "B" and self.backward is None:
            return _of(self.input, action.stage) + _of(self.weight, action.stage)
        cost = {"F": self.forward, "I": self.input, "W": self.weight, "B": self.backward}[action.kind]
        assert cost is not None
        return _of(cost, action.stage)

    def latency(self, source: int, target: int) -> float:
        """Seconds for a result to get from one rank to another; 0 within a rank."""
        if source == target:
            return 0.0
        return self.transfer[source, target] if isinstance(self.transfer, Mapping) else self.transfer


def simulate_crowded(schedule: Schedule, costs: Costs, at_once: float) -> Timeline:
    """The same where ranks share processors: while more than `at_once` of them compute, all of these are slowed down
    alike, so that no more work is done a second."""
    ends: dict[Result, float] = {}
    rows: list[list[Event]] = [[] for _ in schedule.rows]
    left: dict[int, float] = {}  # seconds of work that each computing rank still has to do
    began: dict[int, float] = {}
    now = 0.0
    while left or any(len(row) < len(full) for row, full in zip(rows, schedule.rows, strict=True)):
        arrivals = []
        for rank, full in enumerate(schedule.rows):
            if rank in left or len(rows[rank]) == len(full):
                continue
            action = full[len(rows[rank])]
            needed = needs(action, schedule.stages)
            if all(result in ends for result in needed):
                there = [ends[r] + costs.latency(schedule.rank_of[r.stage], rank) for r in needed]
                if max(there, default=0.0) <= now:
                    left[rank], began[rank] = costs.seconds(action), now
                else:
                    arrivals.append(max(there))
        pace = min(1.0, at_once / len(left)) if left else 1.0
        events = arrivals + ([now + min(left.values()) / pace] if left else [])
        assert events, "the schedule does not pass check"
        before, now = now, min(events)
        for rank in list(left):
            left[rank] -= (now - before) * pace
            if left[rank] <= 1e-12:
                del left[rank]
                action = schedule.rows[rank][len(rows[rank])]
                rows[rank].append(Event(action, began[rank], now))
                if result := makes(action):
                    ends[result] = now
    return Timeline(tuple(map(tuple, rows)))


def _of(cost: PerStage, stage: int) -> float:
    return cost[stage] if isinstance(cost, Sequence) else cost


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """When each computation starts and ends if each rank does its own in order, as soon as it can.

    The schedule must be one that `check` accepts. Without `costs`, F, I and W take 1 s, B 2 s, transfers 0 s.
    """
    run = _Run(schedule, costs or Costs())
    ready = list(range(schedule.ranks))[::-1]
    while ready:
        run.advance(ready.pop(), ready)
    done = tuple(map(tuple, run.rows))
    assert list(map(len, done)) == list(map(len, schedule.rows)), "the schedule does not pass check"
    return Timeline(done)


class _Run:
    """Ranks that go through a schedule, each until it waits for another. A result is known by a number: the output of
    stage s for microbatch m by 2 m S + s, where there are S stages, and the gradient of its input by S more."""

    def __init__(self, schedule: Schedule, costs: Costs):
        self.schedule, self.stages = schedule, schedule.stages
        self.rows: list[list[Event]] = [[] for _ in schedule.rows]
        self.seconds = {
            kind: [costs.seconds(Action(stage, kind, 0)) for stage in range(self.stages)] for kind in KINDS
        }
        rank_of = schedule.rank_of
        hops = list(pairwise(rank_of))
        self.from_before = [0.0, *(costs.latency(a, b) for a, b in hops)]
        self.from_behind = [*(costs.latency(b, a) for a, b in hops), 0.0]
        self.ends: dict[int, float] = {}
        self.waiting: dict[int, int] = {}

    def advance(self, rank: int, ready: list[int]) -> None:
        """Until the rank's end, or until a result is missing; ranks that waited for its results become ready."""
        row, full, stages = self.rows[rank], self.schedule.rows[rank], self.stages
        now = row[-1].end if row else 0.0
        for action in full[len(row) :]:
            stage, kind = action.stage, action.kind
            output = 2 * stages * action.microbatch + stage
            start = now
            for result, way in self._needs(kind, stage, output):
                end = self.ends.get(result)
                if end is None:
                    self.waiting[result] = rank
                    return
                start = max(start, end + way)
            now = start + self.seconds[kind][stage]
            row.append(Event(action, start, now))
            if kind != "W":
                made = output if kind == "F" else output + stages
                self.ends[made] = now
                if made in self.waiting:
                    ready.append(self.waiting.pop(made))

    def _needs(self, kind: str, stage: int, output: int) -> tuple[tuple[int, float], ...]:
        """Results that a computation needs (`dependencies.needs`), and how long each is on its way."""
        if kind == "F":
            return ((output - 1, self.from_before[stage]),) if stage else ()
        if kind == "W":
            return ((output + self.stages, 0.0),)
        if stage == self.stages - 1:
            return ((output, 0.0),)
        return (output, 0.0), (output + self.stages + 1, self.from_behind[stage])
