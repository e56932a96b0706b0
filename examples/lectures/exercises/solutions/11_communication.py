"""Communication: the steps of a ring all-reduce, and what collectives cost.

A message of S bytes takes alpha + S beta seconds. Time: three quarters of an hour. Data: none. Plain Python.
"""

import math


def ring_step(rank: int, ranks: int, number: int) -> tuple[int, int, bool]:
    """What a rank sends in round `number` (from 0) of a ring all-reduce with 2 (n - 1) rounds: (to which rank, which
    chunk, whether the receiver adds it; else it copies). In round 0 rank r sends chunk r to the next rank. In each
    later round it sends the chunk that it has got in the one before. The first n - 1 rounds add."""
    return (rank + 1) % ranks, (rank - number) % ranks, number < ranks - 1


def ring_time(ranks: int, size: float, alpha: float, beta: float) -> float:
    """Seconds of a ring all-reduce of `size` bytes."""
    return 2 * (ranks - 1) * (alpha + size / ranks * beta)


def tree_time(ranks: int, size: float, alpha: float, beta: float) -> float:
    """Seconds of an all-reduce by a binary tree, up and down: every round sends the whole message. ranks: a power of
    2."""
    return 2 * math.log2(ranks) * (alpha + size * beta)


def halving_time(ranks: int, size: float, alpha: float, beta: float) -> float:
    """Seconds of an all-reduce by recursive halving and doubling: log2 n rounds send a half, a quarter, ... of the
    message, and as many more the same in reverse. ranks: a power of 2."""
    return 2 * sum(alpha + size / 2**k * beta for k in range(1, int(math.log2(ranks)) + 1))


def crossover(ranks: int, alpha: float, beta: float) -> float:
    """The size in bytes above which a ring is faster than a tree. ranks: a power of 2, at least 4."""
    rounds, trees = 2 * (ranks - 1), 2 * math.log2(ranks)
    return alpha * (rounds - trees) / (beta * (trees - rounds / ranks))
