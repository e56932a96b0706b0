"""All-reduce by trees, and as a reduce with a broadcast after it. Few rounds; all data goes through the root."""

from __future__ import annotations

from fivefold.schedules.collectives.algorithm import Algorithm, Shape, one
from fivefold.schedules.collectives.families.rings import one as chunk_
from fivefold.schedules.collectives.families.rooted import PIECES, binomial, from_root, star
from fivefold.schedules.collectives.move import Move, Rounds, beside, embed, reverse


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
            rounds[deepest - depth[r] + piece].append(Move(r, above, chunk_(piece), True))
            rounds[deepest + depth[r] - 1 + piece].append(Move(above, r, chunk_(piece)))
    return [tuple(moves) for moves in rounds] if ranks > 1 else []


def double(shape: Shape) -> Rounds:
    """Each half of the message has a tree of its own. Who has children in one is a leaf of the other, or nearly so:
    the second tree is the mirror image of the first, or shifted by one if the number of ranks is odd."""
    n, pieces = shape.ranks, shape.pieces
    rounds = pipelined(n, pieces)
    other = [(r + 1) % n for r in range(n)] if n % 2 else [n - 1 - r for r in range(n)]
    return beside(rounds, embed(rounds, other, lambda c: (pieces + c,)))


ALGORITHMS = (
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
    Algorithm("barrier", "tree", lambda s: there_and_back(binomial(s.ranks)), one, "any number of ranks"),
)  # fmt: skip
