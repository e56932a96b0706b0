"""Proves that a schedule with its sends and receives comes to an end."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from fivefold.schedules.pipeline.action import Action
from fivefold.schedules.pipeline.check import wrong
from fivefold.schedules.pipeline.communication import Transfer, transfer
from fivefold.schedules.pipeline.dependencies import Result, makes, needs
from fivefold.schedules.pipeline.schedule import Schedule


def check_transfers(schedule: Schedule, lists: Sequence[Sequence[Action]]) -> None:
    """Checks lists such as `with_transfers` makes: the computations are those of the schedule, each result that
    another rank needs is sent and received once, and all ranks come to an end even if every send and receive
    blocks until its other side is reached.

    Raises:
        UserError: naming a transfer that is missing or too many, or the actions at which ranks are stuck.
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
    stuck = _run(schedule, lists, of_action)
    if stuck:
        where = ", ".join(f"rank {rank} at {action}" for rank, action in stuck)
        raise wrong(schedule, f"it comes to a halt: waiting are {where}")


def _run(
    schedule: Schedule, lists: Sequence[Sequence[Action]], moves: Mapping[Action, Transfer]
) -> list[tuple[int, Action]]:
    """Does what can be done until nothing can; returns (rank, action) of the ranks that are not at their end."""
    queues = [deque(actions) for actions in lists]
    there: list[set[Result]] = [set() for _ in lists]  # the results that lie on each rank

    def advance(rank: int) -> bool:
        if not queues[rank]:
            return False
        action = queues[rank][0]
        if action.computes:
            if not there[rank].issuperset(needs(action, schedule.stages)):
                return False
            queues[rank].popleft()
            if result := makes(action):
                there[rank].add(result)
            return True
        what, send, receive = moves[action]
        source, target = schedule.rank_of[send.stage], schedule.rank_of[receive.stage]
        meet = queues[source] and queues[target] and (queues[source][0], queues[target][0]) == (send, receive)
        if not meet or what not in there[source]:
            return False
        queues[source].popleft()
        queues[target].popleft()
        there[target].add(what)
        return True

    while any(advance(rank) for rank in range(len(lists))):
        pass
    return [(rank, queue[0]) for rank, queue in enumerate(queues) if queue]
