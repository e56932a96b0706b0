"""Proves that the transfers of a schedule cannot deadlock on a backend that runs messages in the order of their calls.

NCCL is one. A call puts a message into the queue of its communicator and returns. A queue runs one message at a time.
It stays there until it heads the queue of the other rank, too. Messages between two ranks are matched by that order,
not by name. A message also waits for what its rank computed before the call, and a computation waits for the messages
that bring its inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Literal

from fivefold.schedules.pipeline.action import Action, needs
from fivefold.schedules.pipeline.check import wrong
from fivefold.schedules.pipeline.schedule import Schedule
from fivefold.schedules.pipeline.transfers import SENDS_PER_RANK, Transfer, transfer
from fivefold.schedules.walk import walk

Queue = Callable[[int, bool], Hashable]
"""(the other rank, True for a send) -> the one of a rank's queues that has the message."""
QUEUES: dict[str, Queue] = {
    "group": lambda other, sends: "all",
    "pair": lambda other, sends: other,
    "direction": lambda other, sends: (other, sends),
}
"""One communicator for all ranks, as NCCL's batched messages use; one for each two ranks, as PyTorch makes for messages
that are not batched; one for each two ranks and direction."""
Step = tuple[Literal["compute", "call", "wait", "begin", "end"], Action]
"""A rank computes, calls for a message, or waits for a send. A message heads its queue, or has met its other end."""


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
    moves = {action: move for _, move in _made(schedule) for action in (move.send, move.receive)}
    there = Counter(action for actions in lists for action in actions if not action.computes)
    for action in there:
        if action not in moves:
            raise wrong(schedule, f"nobody needs {action}")
        if there[action] > 1:
            raise wrong(schedule, f"{action} is there twice")
    for action in moves:
        if action not in there:
            raise wrong(schedule, f"{action} is missing")
    rows = [[step for action in actions for step in _blocking(action)] for actions in lists]
    _check_end(schedule, moves, rows)


def check_queues(schedule: Schedule, lists: Sequence[Sequence[Action]], queue: Queue) -> None:
    """Walks lists of computations and transfers as such a backend runs them: the computations of a rank are one queue,
    its messages are others. As in the trainer, a rank waits for a send once `SENDS_PER_RANK` are in flight.

    Raises:
        UserError: names two messages that would be matched but do not belong together, or the actions at which
            everything stops.
    """
    moves = {action: move for _, move in _made(schedule) for action in (move.send, move.receive)}
    _check_matches(schedule, lists, moves)
    rows = [_rank(actions, SENDS_PER_RANK * schedule.ranks) for actions in lists]
    for messages in _queues(schedule, lists, moves, queue):
        rows.append([step for action in messages for step in _message(action)])
    _check_end(schedule, moves, rows)


def _made(schedule: Schedule) -> list[tuple[Action, Transfer]]:
    """The computations whose results other ranks need, with the transfers of these."""
    return [(action, move) for row in schedule.rows for action in row if (move := transfer(schedule, action))]


def _check_end(schedule: Schedule, moves: Mapping[Action, Transfer], rows: Sequence[Sequence[Step]]) -> None:
    """Requires that all rows of steps come to their end."""
    maker = {move.send: computation for computation, move in _made(schedule)}
    receive_of = {move.what: move.receive for move in moves.values()}

    def wanted(step: Step) -> Sequence[Step]:
        """The steps of other queues that come before a step."""
        what, action = step
        if what == "compute":
            results = (r for r in needs(action, schedule.stages - 1) if r[1] != action.stage)
            return [("end", receive_of[result]) for result in results if result in receive_of]
        if what == "call":
            return [("compute", maker[action])] if action in maker else ()
        if what == "begin":
            return [("call", action)]
        if what == "wait":
            return [("end", action)]
        _, send, receive = moves[action]
        return [("begin", receive if action == send else send)]

    if stuck := walk(rows, wanted, lambda step: (step,)).stuck:
        where = ", ".join(f"{action} ({what})" for _, ((what, action), _) in sorted(stuck.items()))
        raise wrong(schedule, f"messages in order come to a halt: waiting are {where}")


def _blocking(action: Action) -> list[Step]:
    """The steps of an action whose message blocks its rank."""
    return [("compute", action)] if action.computes else [("call", action), *_message(action)]


def _rank(actions: Sequence[Action], most: int) -> list[Step]:
    """What a rank computes, calls for, and waits for."""
    steps: list[Step] = []
    sends: list[Action] = []
    for action in actions:
        steps.append(("compute" if action.computes else "call", action))
        if action.kind.startswith("SEND"):
            sends.append(action)
            if len(sends) > most:
                steps.append(("wait", sends.pop(0)))
    return steps


def _message(action: Action) -> tuple[Step, Step]:
    return ("begin", action), ("end", action)


def _queues(
    schedule: Schedule, lists: Sequence[Sequence[Action]], moves: Mapping[Action, Transfer], queue: Queue
) -> list[list[Action]]:
    """The messages of each queue of each rank, in the order of their calls."""
    found: dict[Hashable, list[Action]] = {}
    for rank, actions in enumerate(lists):
        for action in actions:
            if not action.computes:
                sends = action.kind.startswith("SEND")
                other = moves[action].receive if sends else moves[action].send
                key = rank, queue(schedule.rank_of[other.stage], sends)
                found.setdefault(key, []).append(action)
    return list(found.values())


def _check_matches(
    schedule: Schedule, lists: Sequence[Sequence[Action]], moves: Mapping[Action, Transfer]
) -> None:
    """Requires that two ranks send and receive the messages between them in the same order."""
    between: dict[tuple[int, int], tuple[list[Transfer], list[Transfer]]] = {}
    for actions in lists:
        for action in actions:
            if not action.computes:
                move = moves[action]
                ends = schedule.rank_of[move.send.stage], schedule.rank_of[move.receive.stage]
                between.setdefault(ends, ([], []))[action == move.receive].append(move)
    for sent, received in between.values():
        for one, other in zip(sent, received, strict=True):
            if one != other:
                raise wrong(schedule, f"{other.receive} would get what {one.send} sends")
