"""Adds sends and receives between ranks to a schedule. Tests prove that they do not deadlock (`message_order.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fivefold.schedules.pipeline.schedule import Action, Result, Schedule, makes
from fivefold.schedules.pipeline.simulate import simulate

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
    if what is None:
        return None
    forward = action.kind == "F"
    target = stage + 1 if forward else stage - 1
    if not 0 <= target < schedule.stages or schedule.rank_of[target] == schedule.rank_of[stage]:
        return None
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


def executed(schedule: Schedule, in_order: bool) -> list[list[Action]]:
    """The lists that a backend executes. in_order: it runs messages in the order of their calls, as NCCL does
    (the common order of all lists cannot deadlock there). Other backends match messages by tag, so receives may begin
    early."""
    lists = with_transfers(schedule)
    return lists if in_order else [receives_ahead(actions) for actions in lists]


def receives_ahead(actions: Sequence[Action]) -> list[Action]:
    """Moves each receive before the computation that preceded it, so that the transfer overlaps with it."""
    found: list[Action] = []
    before = 0  # index of the latest computation
    for action in actions:
        if action.kind.startswith("RECV"):
            found.insert(before, action)
            before += 1
        else:
            if action.computes:
                before = len(found)
            found.append(action)
    return found
