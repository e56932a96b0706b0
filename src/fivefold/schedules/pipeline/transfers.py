"""Adds sends and receives between ranks to a schedule, and proves that they do not deadlock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Literal, NamedTuple

from fivefold.schedules.pipeline.action import Action, Result, makes, needs
from fivefold.schedules.pipeline.check import wrong
from fivefold.schedules.pipeline.schedule import Schedule
from fivefold.schedules.pipeline.simulate import simulate
from fivefold.schedules.walk import walk

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
    (`queues.py` proves that the common order of all lists cannot deadlock there). Other backends match messages by
    tag, so receives may begin early."""
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


def check_transfers(schedule: Schedule, lists: Sequence[Sequence[Action]]) -> None:
    """Checks lists such as `with_transfers` makes. The computations must be those of the schedule. Each result that
    another rank needs is sent and received once. All ranks finish, even if every send and receive blocks until the
    other side is reached.

    Raises:
        UserError: names a transfer that is missing or superfluous, or the actions at which ranks are stuck.
    """
    for rank, (row, actions) in enumerate(zip(schedule.rows, lists, strict=True)):
        if list(row) != [action for action in actions if action.computes]:
            raise wrong(schedule, f"rank {rank} has other computations beside its transfers")
    moves = [move for row in schedule.rows for action in row if (move := transfer(schedule, action))]
    of_action = {action: move for move in moves for action in (move.send, move.receive)}
    there = Counter(action for actions in lists for action in actions if not action.computes)
    for action in there:
        if there[action] > 1 or action not in of_action:
            raise wrong(
                schedule, f"{action} is there twice" if action in of_action else f"nobody needs {action}"
            )
    for action in of_action:
        if action not in there:
            raise wrong(schedule, f"{action} is missing")
    if stuck := _stuck(schedule, lists, of_action):
        where = ", ".join(f"rank {rank} at {action}" for rank, action in stuck)
        raise wrong(schedule, f"it comes to a halt: waiting are {where}")


Half = tuple[Action, Literal["begin", "end"]]
"""A receive begins when its rank reaches it and ends when it has met its send. Other actions only end."""


def _stuck(
    schedule: Schedule, lists: Sequence[Sequence[Action]], moves: Mapping[Action, Transfer]
) -> list[tuple[int, Action]]:
    """(rank, action) of the ranks that do not finish if sends and receives block."""
    rank_of, last = schedule.rank_of, schedule.stages - 1

    def halves(actions: Sequence[Action]) -> list[Half]:
        both: list[Half] = []
        for action in actions:
            if action.kind.startswith("RECV"):
                both.append((action, "begin"))
            both.append((action, "end"))
        return both

    def wanted(half: Half) -> Sequence[Hashable]:
        """A send needs its result on its rank, and the other side at the receive."""
        action, part = half
        if part == "begin":
            return ()
        if action.computes:
            return [(rank_of[action.stage], result) for result in needs(action, last)]
        what, send, receive = moves[action]
        if action == receive:
            return [(rank_of[receive.stage], what)]
        return [(receive, "begin"), (rank_of[send.stage], what)]

    def made(half: Half) -> Sequence[Hashable]:
        """A send puts its result on the other rank."""
        action, part = half
        if part == "begin":
            return (half,)
        if action.computes:
            result = makes(action)
            return [(rank_of[action.stage], result)] if result else ()
        what, send, receive = moves[action]
        return [(rank_of[receive.stage], what)] if action == send else ()

    stuck = walk([halves(actions) for actions in lists], wanted, made).stuck
    return [(rank, action) for rank, ((action, _), _) in sorted(stuck.items())]
