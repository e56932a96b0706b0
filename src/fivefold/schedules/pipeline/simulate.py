"""Simulates a schedule, given the costs of its actions, and adds sends and receives between ranks in the order of a
simulated step. Tests prove that they do not deadlock (`message_order.py`). A timeline is what a simulation finds, or
what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fivefold.schedules.pipeline.schedule import COMPUTE, Action, Result, Schedule, makes

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Seconds per microbatch: one number for all stages, or one for each.

    `backward` (B) defaults to input + weight. PyTorch's runtime does the whole backward of the first stage in W, since
    nobody needs its input gradient. `transfer`: from a computation's end until its result is on another rank; one
    number, or one for each (from rank, to rank). Transfers overlap with computations and with each other. `messages`:
    seconds of F and of B at each stage in which they wait for messages that the other one of a pair hides.
    """

    forward: PerStage = 1.0
    input: PerStage = 1.0
    weight: PerStage = 1.0
    backward: PerStage | None = None
    transfer: float | Mapping[tuple[int, int], float] = 0.0
    messages: Sequence[tuple[float, float]] = ()

    def hidden(self, ahead: int, behind: int) -> float:
        """Seconds that a pair of the forward of stage `ahead` and the backward of stage `behind` is shorter than
        both."""
        if not self.messages:
            return 0.0
        there, back = self.messages[ahead][0], self.messages[behind][1]
        forward, backward = self.seconds(Action(ahead, "F", 0)), self.seconds(Action(behind, "B", 0))
        return min(there, backward - back) + min(back, forward - there)

    def seconds(self, action: Action) -> float:
        """Duration of a computation."""
        if action.kind == "B" and self.backward is None:
            return _of(self.input, action.stage) + _of(self.weight, action.stage)
        cost = {"F": self.forward, "I": self.input, "W": self.weight, "B": self.backward}[action.kind]
        assert cost is not None
        return _of(cost, action.stage)

    def latency(self, source: int, target: int) -> float:
        """Seconds that a result takes from one rank to another; 0 within a rank."""
        if source == target:
            return 0.0
        return self.transfer[source, target] if isinstance(self.transfer, Mapping) else self.transfer


def _of(cost: PerStage, stage: int) -> float:
    return cost[stage] if isinstance(cost, Sequence) else cost


class Event(NamedTuple):
    """An action of a rank, from `start` to `end` in seconds since the step began."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """`rows[r]`: the events of rank r, simulated or measured, in time order and without overlap."""

    rows: tuple[tuple[Event, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @cached_property
    def start(self) -> float:
        """When the first rank starts, in seconds."""
        return min((event.start for event in self.events()), default=0.0)

    @cached_property
    def end(self) -> float:
        """When the last rank ends, in seconds."""
        return max((event.end for event in self.events()), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return self.end - self.start

    @cached_property
    def bubble(self) -> float:
        """Share of all ranks' time in which they are idle, 0..1."""
        return sum(map(self.idle_share, range(self.ranks))) / self.ranks

    def busy(self, rank: int) -> float:
        """Seconds in which a rank works."""
        return sum(event.end - event.start for event in self.rows[rank])

    def idle_share(self, rank: int) -> float:
        """Share of the makespan in which a rank is idle, 0..1."""
        return 1 - self.busy(rank) / self.makespan if self.makespan else 0.0

    def events(self) -> Iterator[Event]:
        """The events of all ranks."""
        for row in self.rows:
            yield from row


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Start and end of each computation if each rank runs its own in order, as soon as it can.

    The schedule must pass `check`. Without `costs`, F, I and W take 1 s, B 2 s, transfers 0 s.
    """
    costs, way, pairs = costs or Costs(), schedule.walked, schedule.ahead
    assert not way.stuck, "the schedule does not pass check"
    seconds = {
        kind: [costs.seconds(Action(stage, kind, 0)) for stage in range(schedule.stages)] for kind in COMPUTE
    }
    rows: list[list[Event]] = [[] for _ in schedule.rows]
    free = [0.0] * schedule.ranks  # when each rank becomes idle
    ends: list[float] = []  # of each step
    for rank, action, after in zip(way.ranks, way.actions, way.after, strict=True):
        start = free[rank]
        for step in after:
            start = max(start, ends[step] + costs.latency(way.ranks[step], rank))
        stage, kind, _ = action
        ahead = pairs.get(action)
        hidden = costs.hidden(ahead.stage, stage) if ahead else 0.0
        free[rank] = end = start + seconds[kind][stage] - hidden
        ends.append(end)
        rows[rank].append(Event(action, start, end))
    return Timeline(tuple(map(tuple, rows)))


def simulate_oversubscribed(schedule: Schedule, costs: Costs, at_once: float) -> Timeline:
    """Simulates ranks that share processors.

    While more than `at_once` of them compute, all slow down equally, so the total work per second is constant.
    """
    way, pairs = schedule.walked, schedule.ahead
    assert not way.stuck, "the schedule does not pass check"
    # Steps that each rank still has to do, in reverse order
    to_do: list[list[int]] = [[] for _ in schedule.rows]
    for step in reversed(range(len(way.ranks))):
        to_do[way.ranks[step]].append(step)
    ends: dict[int, float] = {}  # of each step that is done
    rows: list[list[Event]] = [[] for _ in schedule.rows]
    left: dict[int, float] = {}  # seconds of work that each computing rank still has to do
    began: dict[int, float] = {}
    now = 0.0
    while any(to_do):
        arrivals = []
        for rank, steps in enumerate(to_do):
            if rank in left or not steps or not all(step in ends for step in way.after[steps[-1]]):
                continue
            there = (ends[step] + costs.latency(way.ranks[step], rank) for step in way.after[steps[-1]])
            arrival = max(there, default=0.0)
            if arrival <= now:
                action = way.actions[steps[-1]]
                ahead = pairs.get(action)
                hidden = costs.hidden(ahead.stage, action.stage) if ahead else 0.0
                left[rank], began[rank] = costs.seconds(action) - hidden, now
            else:
                arrivals.append(arrival)
        pace = min(1.0, at_once / len(left)) if left else 1.0
        before, now = now, min(arrivals + ([now + min(left.values()) / pace] if left else []))
        for rank in list(left):
            left[rank] -= (now - before) * pace
            if left[rank] <= 1e-12:
                del left[rank]
                step = to_do[rank].pop()
                rows[rank].append(Event(way.actions[step], began[rank], now))
                ends[step] = now
    return Timeline(tuple(map(tuple, rows)))


SENDS_PER_RANK = 2
"""Most sends in flight per rank, as a multiple of the pipeline's ranks. Each keeps its tensor in memory."""


class Transfer(NamedTuple):
    """A result on its way to another rank."""

    what: Result
    send: Action
    receive: Action


def transfer(schedule: Schedule, action: Action) -> Transfer | None:
    """The transfer of a computation's result; None if no other rank needs it."""
    what, stage = makes(action), action.stage
    target = stage + 1 if action.kind == "F" else stage - 1
    if (
        what is None
        or target // schedule.length != stage // schedule.length
        or schedule.rank_of[target] == schedule.rank_of[stage]
    ):
        return None
    forward = action.kind == "F"
    send = Action(stage, "SEND_F" if forward else "SEND_B", action.microbatch)
    return Transfer(what, send, Action(target, "RECV_F" if forward else "RECV_B", action.microbatch))


def with_transfers(schedule: Schedule) -> list[list[Action]]:
    """Each rank's computations with the transfers they need, in order. The schedule must pass `check`.

    A transfer is listed on both ranks at the moment of a simulated step when its result is made. So all lists follow
    one common order: two ranks list the transfers between them in the same order. Nothing deadlocks, even if every send
    and receive blocks until the other side is there. Hosts that make a communicator at a first message do block.
    """
    moments = []
    for rank, row in enumerate(simulate(schedule).rows):
        ends = {action: end for action, _, end in row}
        for action, start, end in row:
            moments.append((start, 1, rank, action))
            end = ends[schedule.pairs.get(action, action)]
            moments.append((end, 0, rank, action))  # ends come first: a result can be used at once
    lists: list[list[Action]] = [[] for _ in schedule.rows]
    for _, starts, rank, action in sorted(moments, key=lambda moment: moment[:3]):
        if starts:
            lists[rank].append(action)
        elif move := transfer(schedule, action):
            lists[rank].append(move.send)
            lists[schedule.rank_of[move.receive.stage]].append(move.receive)
    return lists


def receives_ahead(actions: Sequence[Action]) -> list[Action]:
    """Moves each receive before the computation that preceded it, so that the transfer overlaps with it."""
    moved: list[Action] = []
    before = 0  # index of the latest computation
    for action in actions:
        if action.kind.startswith("RECV"):
            moved.insert(before, action)
            before += 1
        else:
            if action.computes:
                before = len(moved)
            moved.append(action)
    return moved


def executed(schedule: Schedule, in_order: bool) -> list[list[Action]]:
    """The lists that a backend executes. in_order: it runs messages in the order of their calls, as NCCL does
    (the common order of all lists cannot deadlock there). Other backends match messages by tag, so receives may begin
    early."""
    lists = with_transfers(schedule)
    return lists if in_order else [receives_ahead(actions) for actions in lists]
