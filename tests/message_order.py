"""Do the messages of all ranks meet? Walks the lists of pipelines and collectives as backends run them."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fivefold.schedules.collectives import Collective
from fivefold.schedules.collectives.collective import Group, embed
from fivefold.schedules.pipeline import SENDS_PER_RANK, Action, Schedule
from fivefold.schedules.pipeline.schedule import needs, walk
from fivefold.schedules.pipeline.simulate import transfer

Queue = Callable[[int, bool], Hashable]
"""(the other rank, True for a send) -> the one of a rank's queues (communicators) that has the message."""
QUEUES: dict[str, Queue] = {
    "group": lambda other, sends: "all",  # as NCCL's batched messages
    "pair": lambda other, sends: other,  # as PyTorch makes for messages that are not batched
    "direction": lambda other, sends: (other, sends),
}
Step = tuple[str, Action]
"""A rank computes, calls for a message, or waits for a send. A message begins (heads its queue) and ends (met)."""


def halts(rows: Sequence[Sequence[Any]], needs: Callable[[Any], Sequence[Any]]) -> list[Any]:
    """The step at which each row waits forever. needs: the steps of other rows that come before a step."""
    return [step for _, (step, _) in sorted(walk(rows, needs, lambda step: (step,)).stuck.items())]


def transfers(schedule: Schedule) -> dict[Action, Any]:
    """The transfer of each send and each receive that the schedule needs."""
    moves = filter(None, (transfer(schedule, action) for row in schedule.rows for action in row))
    return {action: move for move in moves for action in (move.send, move.receive)}


def check_transfers(schedule: Schedule, lists: Sequence[Sequence[Action]]) -> None:
    """Computations are those of the schedule, and each result that another rank needs is sent and received once. All
    ranks finish, even if every send and receive blocks until the other side is reached."""
    assert [[a for a in actions if a.computes] for actions in lists] == [list(row) for row in schedule.rows]
    moves = transfers(schedule)
    assert Counter(a for actions in lists for a in actions if not a.computes) == Counter(list(moves))
    blocking = [
        [(what, a) for a in actions for what in (("compute",) if a.computes else ("call", "begin", "end"))]
        for actions in lists
    ]
    assert halts(blocking, wanted(schedule, moves)) == []


def queue_halts(schedule: Schedule, lists: Sequence[Sequence[Action]], queue: Queue) -> list[Step]:
    """Where ranks halt if a rank's computations are one queue and its messages others, matched by their order. As in
    the trainer, a rank waits for a send once `SENDS_PER_RANK` are in flight."""
    moves = transfers(schedule)
    between: dict[Hashable, tuple[list[Any], list[Any]]] = {}
    queues: dict[Hashable, list[Step]] = {}
    for rank, actions in enumerate(lists):
        for action in (action for action in actions if not action.computes):
            _, send, receive = moves[action]
            sends = action == send
            between.setdefault((send.stage, receive.stage), ([], []))[sends].append(send)
            other = schedule.rank_of[(receive if sends else send).stage]
            queues.setdefault((rank, queue(other, sends)), []).extend([("begin", action), ("end", action)])
    assert all(sent == received for received, sent in between.values())
    ranks = [list(rank_steps(actions, SENDS_PER_RANK * schedule.ranks)) for actions in lists]
    return halts([*ranks, *queues.values()], wanted(schedule, moves))


def rank_steps(actions: Iterable[Action], most: int) -> Iterable[Step]:
    """What a rank computes and calls for; it waits for its oldest send where more than `most` are in flight."""
    sends: list[Action] = []
    for action in actions:
        yield ("compute" if action.computes else "call"), action
        if action.kind.startswith("SEND"):
            sends.append(action)
            if len(sends) > most:
                yield "wait", sends.pop(0)


def wanted(schedule: Schedule, moves: Mapping[Action, Any]) -> Callable[[Step], list[Step]]:
    """The steps of other queues that come before a step."""
    maker = {move.send: a for row in schedule.rows for a in row if (move := transfer(schedule, a))}
    receive_of = {what: receive for what, _, receive in moves.values()}

    def before(step: Step) -> list[Step]:
        what, action = step
        if what == "compute":
            results = (r for r in needs(action, schedule.length) if r[1] != action.stage)
            return [("end", receive_of[result]) for result in results if result in receive_of]
        if what == "call":
            return [("compute", maker[action])] if action in maker else []
        if what in ("begin", "wait"):
            return [("call" if what == "begin" else "end", action)]
        _, send, receive = moves[action]
        return [("begin", receive if action == send else send)]

    return before


def group_halts(collective: Collective, rows: Sequence[Sequence[Group]] | None = None) -> list[Any]:
    """The groups (rank, place in its list) at which ranks wait forever under NCCL's rules: a rank's groups run in
    order, and a message moves only when both sides are in it. Messages between two ranks are matched by their order."""
    rows = collective.rows if rows is None else rows
    ends: dict[
        Hashable, tuple[list[Any], list[Any]]
    ] = {}  # of two ranks: the groups that send, and that receive
    moved: dict[Hashable, tuple[list[Any], list[Any]]] = {}
    met: dict[Any, list[Any]] = {}  # for each group, where the other halves of its messages stand
    for rank, row in enumerate(rows):
        for at, group in enumerate(row):
            for receives, moves in enumerate((group.sends, group.receives)):
                for move in moves:
                    assert move[receives] == rank
                    ends.setdefault(move[:2], ([], []))[receives].append((rank, at))
                    moved.setdefault(move[:2], ([], []))[receives].append(move)
    for pair, (sent, received) in moved.items():
        assert sent == received, pair
        for a, b in zip(*ends[pair], strict=True):
            met.setdefault(a, []).append(("begin", b))
            met.setdefault(b, []).append(("begin", a))
    steps = [
        [(w, (rank, at)) for at in range(len(row)) for w in ("begin", "end")] for rank, row in enumerate(rows)
    ]
    return [group for _, group in halts(steps, lambda step: met.get(step[1], []) if step[0] == "end" else [])]


def renamed(collective: Collective, order: Sequence[int]) -> Collective:
    """The same with rank order[r] in place of rank r."""
    return replace(collective, rounds=tuple(embed(collective.rounds, order)), root=order[collective.root])
