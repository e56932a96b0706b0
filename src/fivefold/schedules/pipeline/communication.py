"""Puts the sends and receives between ranks into a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fivefold.schedules.pipeline.action import Action
from fivefold.schedules.pipeline.dependencies import Result, makes
from fivefold.schedules.pipeline.schedule import Schedule
from fivefold.schedules.pipeline.simulate import simulate


class Transfer(NamedTuple):
    """A result on its way to another rank."""

    what: Result
    send: Action
    receive: Action


def transfer(schedule: Schedule, action: Action) -> Transfer | None:
    """The transfer of what a computation makes; None if no other rank needs it."""
    what, stage = makes(action), action.stage
    if what is None:
        return None
    target = stage + 1 if action.kind == "F" else stage - 1
    if not 0 <= target < schedule.stages or schedule.rank_of[target] == schedule.rank_of[stage]:
        return None
    if action.kind == "F":
        send, receive = (
            Action(stage, "SEND_F", action.microbatch),
            Action(target, "RECV_F", action.microbatch),
        )
    else:
        send, receive = (
            Action(stage, "SEND_B", action.microbatch),
            Action(target, "RECV_B", action.microbatch),
        )
    return Transfer(what, send, receive)


def with_transfers(schedule: Schedule) -> list[list[Action]]:
    """Each rank's computations with the transfers they need, in order. The schedule is one that `check` accepts.

    A transfer is put into both ranks' lists at the same moment of a simulated step, when its result is made.
    All lists are thus parts of one common order. So two ranks list the transfers between them in the same
    order, and nothing deadlocks, even where a send or a receive blocks until the other side is there.
    """
    moments = []
    for rank, row in enumerate(simulate(schedule).rows):
        for action, start, end in row:
            moments.append((start, 1, rank, action))
            moments.append((end, 0, rank, action))  # what is made now can be used now, so ends come first
    lists: list[list[Action]] = [[] for _ in schedule.rows]
    for _, starts, rank, action in sorted(moments, key=lambda moment: moment[:3]):
        if starts:
            lists[rank].append(action)
        elif move := transfer(schedule, action):
            lists[rank].append(move.send)
            lists[schedule.rank_of[move.receive.stage]].append(move.receive)
    return lists


def receives_ahead(actions: Sequence[Action]) -> list[Action]:
    """The same list, with each receive before the computation that preceded it: what arrives then moves beside it."""
    found: list[Action] = []
    before = 0  # where the latest computation stands
    for action in actions:
        if action.kind.startswith("RECV"):
            found.insert(before, action)
            before += 1
        else:
            if action.computes:
                before = len(found)
            found.append(action)
    return found
