"""How long a schedule takes, given what its actions cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fivefold.schedules.pipeline.action import Action
from fivefold.schedules.pipeline.dependencies import Result, makes, needs, walk
from fivefold.schedules.pipeline.schedule import Schedule
from fivefold.schedules.pipeline.timeline import Event, Timeline

PerStage = float | Sequence[float]


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
    costs = costs or Costs()
    ends: dict[Result, float] = {}
    rows: list[list[Event]] = [[] for _ in schedule.rows]

    def run(rank: int, action: Action) -> None:
        arrivals = (
            ends[result] + costs.latency(schedule.rank_of[result.stage], rank)
            for result in needs(action, schedule.stages)
        )
        start = max(rows[rank][-1].end if rows[rank] else 0.0, *arrivals, 0.0)
        rows[rank].append(Event(action, start, start + costs.seconds(action)))
        if result := makes(action):
            ends[result] = rows[rank][-1].end

    waiting = walk(schedule, run)
    assert not waiting, f"the schedule does not pass check: {waiting}"
    return Timeline(tuple(map(tuple, rows)))
