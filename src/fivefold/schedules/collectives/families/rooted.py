"""Collectives with a root: send, broadcast, scatter, and their reverses, reduce and gather. All-reduces by trees, or
as a reduce and a broadcast: few rounds, and all data goes through the root.

Everything is written for root 0; other ranks count from the root.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fivefold.schedules.collectives.collective import (
    Algorithm,
    Line,
    Move,
    Primitive,
    Rounds,
    Shape,
    beside,
    each_rank,
    embed,
    log2,
    one,
    reverse,
)
from fivefold.schedules.collectives.families import rings

ALL = range(1)
THAKUR = "Thakur et al. 2005, Optimization of collective communication operations in MPICH"


def from_root(rounds: Rounds, shape: Shape, blocks: bool = False) -> Rounds:
    """The rounds of root 0, with the root of the shape. blocks: chunk r belongs to rank r."""
    order = [(r + shape.root) % shape.ranks for r in range(shape.ranks)]
    return embed(rounds, order, (lambda c: (order[c],)) if blocks else None)


def binomial(ranks: int) -> Rounds:
    """Broadcast from rank 0: in each round everyone who has the message sends it on, so twice as many have it."""
    return [
        tuple(Move(r, r + (1 << k), ALL) for r in range(min(1 << k, ranks - (1 << k))))
        for k in range(log2(ranks))
    ]


def star(ranks: int, scatter: bool = False) -> Rounds:
    """Rank 0 sends everyone the message, or (scatter) its own chunk."""
    moves = tuple(Move(0, r, rings.one(r) if scatter else ALL) for r in range(1, ranks))
    return [moves] if moves else []


def chain(ranks: int, pieces: int) -> Rounds:
    """Broadcast from rank 0 along a chain, in pieces that follow each other."""
    return [
        tuple(Move(r, r + 1, rings.one(t - r)) for r in range(ranks - 1) if 0 <= t - r < pieces)
        for t in range(pieces + ranks - 2)
        if ranks > 1
    ]


def binomial_scatter(ranks: int) -> Rounds:
    """Scatter from rank 0: everyone keeps the first half of its chunks and sends the rest on."""
    return [
        tuple(
            Move(r, r + (1 << k), range(r + (1 << k), min(r + (2 << k), ranks)))
            for r in range(0, ranks - (1 << k), 2 << k)
        )
        for k in reversed(range(log2(ranks)))
    ]


def scatter_gather(shape: Shape) -> Rounds:
    """Broadcast: every rank gets a part, and all ranks gather the parts."""
    return from_root(binomial_scatter(shape.ranks) + rings.gather(shape.ranks), shape, True)


def scatter_gather_reduce(shape: Shape) -> Rounds:
    """Reduce: every rank sums a part, and the root gathers the parts."""
    both = rings.scatter(shape.ranks) + reverse(binomial_scatter(shape.ranks), reduce=False)
    return from_root(both, shape, True)


def there_and_back(broadcast: Rounds) -> Rounds:
    return reverse(broadcast, True) + broadcast


def parent(rank: int, ranks: int) -> int:
    """The parent in a binary tree over ranks in order, with root 0. Odd ranks are leaves, or have few below them."""
    low = rank & -rank
    above = rank + low
    return above if not rank & 2 * low and above < ranks else rank - low


def pipelined(ranks: int, pieces: int) -> Rounds:
    """All-reduce of `pieces` chunks over one tree: up to the root, and down again behind the sums."""
    depth = [0] * ranks
    by_height = sorted(range(1, ranks), key=lambda r: r & -r, reverse=True)
    for r in by_height:
        depth[r] = depth[parent(r, ranks)] + 1
    deepest = max(depth)
    rounds: list[list[Move]] = [[] for _ in range(2 * deepest + pieces - 1)]
    for r in range(1, ranks):
        above = parent(r, ranks)
        for piece in range(pieces):
            rounds[deepest - depth[r] + piece].append(Move(r, above, rings.one(piece), True))
            rounds[deepest + depth[r] - 1 + piece].append(Move(above, r, rings.one(piece)))
    return [tuple(moves) for moves in rounds] if ranks > 1 else []


def in_network(shape: Shape) -> Rounds:
    """All ranks send everything to a switch, which sends the sum to all of them."""
    up = tuple(Move(r, shape.ranks, ALL, True) for r in range(shape.ranks))
    return [up, *reverse([up], False)]


def double(shape: Shape) -> Rounds:
    """Each half of the message has a tree of its own. Who has children in one is a leaf of the other, or nearly so:
    the second tree is the mirror image of the first, or shifted by one if the number of ranks is odd."""
    n, pieces = shape.ranks, shape.pieces
    rounds = pipelined(n, pieces)
    other = [(r + 1) % n for r in range(n)] if n % 2 else [n - 1 - r for r in range(n)]
    return beside(rounds, embed(rounds, other, lambda c: (pieces + c,)))


def _both_ways(
    primitive: Primitive, name: str, rounds: Callable[[Shape], Rounds], *facts: Any, **more: Any
) -> tuple[Algorithm, Algorithm]:
    """A broadcast and its reverse, which is a reduce; a scatter and its reverse, a gather."""
    back: Primitive = "reduce" if primitive == "broadcast" else "gather"
    return (
        Algorithm(primitive, name, rounds, *facts, **more),
        Algorithm(back, name, lambda shape: reverse(rounds(shape), back == "reduce"), *facts, **more),
    )


PIECES = (1, 2, 4, 8, 16, 32, 64)

ALGORITHMS = (
    Algorithm(
        "send", "direct", lambda s: from_root([(Move(0, 1, ALL),)], s), one, "one rank to the next",
        fits=lambda s: s.ranks > 1, needs="2 or more",
    ),
    *_both_ways("broadcast", "star", lambda s: from_root(star(s.ranks), s), one, "two or three ranks"),
    *_both_ways("broadcast", "binomial", lambda s: from_root(binomial(s.ranks), s), one, "small messages", THAKUR),
    *_both_ways(
        "broadcast", "chain", lambda s: from_root(chain(s.ranks, s.pieces), s), lambda s: s.pieces,
        "very large messages, few ranks", pieces=PIECES,
    ),
    Algorithm(
        "broadcast", "scatter_gather", scatter_gather, each_rank, "large messages",
        "van de Geijn 1994; " + THAKUR,
    ),
    Algorithm(
        "reduce", "scatter_gather", scatter_gather_reduce, each_rank, "large messages", "Rabenseifner 2004; " + THAKUR
    ),
    *_both_ways(
        "scatter", "star", lambda s: from_root(star(s.ranks, scatter=True), s, True), each_rank, "large messages"
    ),
    *_both_ways(
        "scatter", "binomial", lambda s: from_root(binomial_scatter(s.ranks), s, True), each_rank,
        "small messages", THAKUR,
    ),
    Algorithm(
        "all_reduce", "reduce_broadcast", lambda s: there_and_back(from_root(star(s.ranks), s)), one,
        "two ranks: the root's link carries everything",
    ),
    Algorithm(
        "all_reduce", "tree", lambda s: there_and_back(from_root(binomial(s.ranks), s)), one,
        "small messages, any number of ranks",
    ),
    Algorithm(
        "all_reduce", "double_tree", double, lambda s: 2 * s.pieces,
        "large messages on very many ranks, in pieces",
        "Sanders, Speck, Traeff 2009, Two-tree algorithms for full bandwidth broadcast, reduction and scan",
        pieces=PIECES,
    ),
    Algorithm(
        "all_reduce", "in_network", in_network, one,
        "a switch that adds: everything is sent once",
        "Graham et al. 2016, Scalable hierarchical aggregation protocol (SHArP)", needs="a switch that adds",
        switches=1, line=lambda _, at: Line(at.switch.latency, 1 / at.switch.bandwidth) if at.switch else None,
    ),
    Algorithm("barrier", "tree", lambda s: there_and_back(binomial(s.ranks)), one, "any number of ranks"),
)  # fmt: skip
