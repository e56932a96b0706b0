"""Ring attention (arXiv 2310.01889) as data: the keys that a rank sees, sends and receives in each turn.

Keys and values travel from each rank to the one before it. Each rank has a chunk from the front of the sequence and its
mirror image from the back. So under a causal mask, keys of a later rank are seen only by a rank's late queries. Keys of
an earlier rank are seen by all queries, but only their early half. The keys of rank j first visit ranks j-1 .. 0, then
c-1 .. j+1: from rank 0 on, only their early half travels.

`parallel/context.py` runs the turns; `plan` adds up their bytes (`messages`) and prices them.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple


class Turn(NamedTuple):
    """One turn of one rank. Shares refer to a rank's tokens: 1 is all of them, 0.5 the early half, 0 none.

    owner: the rank whose keys and values are present. keys: the share of them that is present. late: True if only the
    late half of the rank's queries attends to them. sends, receives: the share of keys and values that goes to the
    previous rank, and that arrives from the next rank, for the next turn. visited: the rank that has this rank's own
    keys. comes_home: in backward, the share of them for which it returns gradients; this rank returns those of `keys`
    to `owner`.
    """

    owner: int
    keys: float
    late: bool
    sends: float
    receives: float
    visited: int
    comes_home: float


@cache
def turns(ranks: int, index: int, causal: bool) -> tuple[Turn, ...]:
    """The turns of rank `index` of a ring, its own keys first."""

    def keys(rank: int, turn: int) -> float:
        """The share of their owner's keys that a rank has in a turn, and that later ranks still need."""
        if turn == ranks:
            return 0.0
        return 1.0 if not causal or rank % ranks + turn < ranks else 0.5

    found = []
    for turn in range(ranks):
        owner, visited = (index + turn) % ranks, (index - turn) % ranks
        moves = keys(index - 1, turn + 1), keys(index, turn + 1)
        late, home = causal and owner > index, keys(visited, turn) if turn else 0.0
        found.append(Turn(owner, keys(index, turn), late, *moves, visited, home))
    return tuple(found)


@cache
def messages(ranks: int, index: int, causal: bool, backward: bool) -> tuple[tuple[float, float], ...]:
    """The shares of keys and values that rank `index` (sends, receives) in each of its messages. Backward also returns
    gradients to the owners of the keys. Rank 0 receives all of the keys of every other rank and returns gradients for
    all of them, so the ring waits for whole keys in every message."""
    way = turns(ranks, index, causal)
    home = tuple((turn.keys, turn.comes_home) for turn in way[1:]) if backward else ()
    return tuple((turn.sends, turn.receives) for turn in way[:-1]) + home
