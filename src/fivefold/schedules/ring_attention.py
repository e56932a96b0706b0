"""Ring attention (arXiv 2310.01889) as data: the keys that a rank sees, sends and receives in each turn.

Keys and values travel from each rank to the one before it. Each rank has a chunk from the front of the sequence and its
mirror image from the back. So under a causal mask, keys of a later rank are seen only by a rank's late queries. Keys of
an earlier rank are seen by all queries, but only their early half. The keys of rank j first visit ranks j-1 .. 0, then
c-1 .. j+1: from rank 0 on, only their early half travels.

Where a query sees a window of keys only, few ranks have any of them. Keys then go straight from their owner to the
ranks that see some, and a turn in which nobody would see any is left out.

`parallel/context.py` runs the turns; `plan` adds up their bytes (`messages`) and prices them.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple


class Turn(NamedTuple):
    """One turn of one rank. Shares refer to a rank's tokens: 1 is all of them, 0.5 the early half, 0 none.

    owner: the rank whose keys and values are present. keys: the share of them that is present. late: True if only the
    late half of the rank's queries attends to them. sends, receives: the share of keys and values that goes to rank
    `to`, and that arrives from rank `source`, for the next turn. visited: the rank that has this rank's own keys.
    comes_home: in backward, the share of them for which it returns gradients; this rank returns those of `keys` to
    `owner`. direct: a rank sends its own keys, not those present.
    """

    owner: int
    keys: float
    late: bool
    sends: float
    receives: float
    visited: int
    comes_home: float
    to: int
    source: int
    direct: bool = False


def reach_of(ranks: int, T: int, window: int) -> int | None:
    """The chunks before its own in which a query sees keys, if it sees `window` of them; None: all."""
    reach = -(-(window - 1) // max(1, T // (2 * ranks)))
    return reach if window and reach < 2 * ranks - 1 else None


@cache
def turns(ranks: int, index: int, causal: bool, reach: int | None = None) -> tuple[Turn, ...]:
    """The turns of rank `index` of a ring, its own keys first. reach: `reach_of`, under a causal mask."""
    if reach is not None:
        return _within_reach(ranks, index, reach)

    def keys(rank: int, turn: int) -> float:
        """The share of their owner's keys that a rank has in a turn, and that later ranks still need."""
        if turn == ranks:
            return 0.0
        return 1.0 if not causal or rank % ranks + turn < ranks else 0.5

    found, neighbours = [], ((index - 1) % ranks, (index + 1) % ranks)
    for turn in range(ranks):
        owner, visited = (index + turn) % ranks, (index - turn) % ranks
        moves = keys(index - 1, turn + 1), keys(index, turn + 1)
        late, home = causal and owner > index, keys(visited, turn) if turn else 0.0
        found.append(Turn(owner, keys(index, turn), late, *moves, visited, home, *neighbours))
    return tuple(found)


def _within_reach(ranks: int, index: int, reach: int) -> tuple[Turn, ...]:
    """`turns` with a window, the same number of them for all ranks."""

    def seen(rank: int, owner: int) -> float:
        """The share of their owner's keys that a rank needs."""
        early, late = (
            any(0 <= query - keys <= reach for query in (rank, 2 * ranks - 1 - rank))
            for keys in (owner, 2 * ranks - 1 - owner)
        )
        return 1.0 if late else 0.5 * early

    every = range(ranks)
    steps = [step for step in every if any(seen(rank, (rank + step) % ranks) for rank in every)]
    found = []
    for step, following in zip(steps, [*steps[1:], 0], strict=True):
        owner, visited = (index + step) % ranks, (index - step) % ranks
        source, to = (index + following) % ranks, (index - following) % ranks
        moves = (seen(to, index), seen(index, source)) if following else (0.0, 0.0)
        home = seen(visited, index) if step else 0.0
        found.append(Turn(owner, seen(index, owner), owner > index, *moves, visited, home, to, source, True))
    return tuple(found)


@cache
def messages(
    ranks: int, index: int, causal: bool, backward: bool, reach: int | None = None
) -> tuple[tuple[float, float], ...]:
    """The shares of keys and values that rank `index` (sends, receives) in each of its messages. Backward also returns
    gradients to the owners of the keys. Without a window, rank 0 receives all of the keys of every other rank and
    returns gradients for all of them, so the ring waits for whole keys in every message."""
    way = turns(ranks, index, causal, reach)
    home = tuple((turn.keys, turn.comes_home) for turn in way[1:]) if backward else ()
    return tuple((turn.sends, turn.receives) for turn in way[:-1]) + home


@cache
def slowest(ranks: int, causal: bool, backward: bool, reach: int | None = None) -> tuple[float, ...]:
    """The largest share of keys and values that any rank sends in each of its messages."""
    if reach is None:
        return tuple(1.0 for _ in messages(ranks, 0, causal, backward))
    every = (messages(ranks, index, causal, backward, reach) for index in range(ranks))
    return tuple(max(sent for sent, _ in some) for some in zip(*every, strict=True))
