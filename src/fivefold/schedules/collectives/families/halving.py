"""Exchanges at distances 1, 2, 4, ...: logarithmically many rounds.

Numbers of ranks that are no powers of two are folded: of the first ranks, pairs become one until a power of two is left
(Rabenseifner 2004; Thakur et al. 2005, section 4).
"""

from __future__ import annotations

from fivefold.schedules.collectives.collective import (
    Algorithm,
    Levels,
    Line,
    Move,
    Rounds,
    Shape,
    each_rank,
    embed,
    log2,
    one,
    power_of_two,
    ranges,
    reverse,
)
from fivefold.schedules.collectives.families.rooted import ALL, THAKUR

RABENSEIFNER = "Rabenseifner 2004, Optimization of collective reduction operations"


def halving(ranks: int) -> Rounds:
    """Reduce-scatter on a power of two: farthest partners first, each keeps the half with its own chunk."""
    distances = [1 << k for k in reversed(range(log2(ranks)))]
    return [
        tuple(Move(r, r ^ d, range((r ^ d) // d * d, (r ^ d) // d * d + d), True) for r in range(ranks))
        for d in distances
    ]


def doubling(ranks: int) -> Rounds:
    """Recursive doubling on a power of two: partners exchange all they have, nearest first."""
    return [tuple(Move(r, r ^ 1 << k, ALL, True) for r in range(ranks)) for k in range(log2(ranks))]


def bruck(ranks: int) -> Rounds:
    """All-gather for any number of ranks: each sends what it has, up to what is missing, to the rank d before it."""
    return [
        tuple(
            Move(r, (r - d) % ranks, some)
            for r in range(ranks)
            for some in ranges(sorted((r + i) % ranks for i in range(min(d, ranks - d))))
        )
        for d in (1 << k for k in range(log2(ranks)))
    ]


def left(ranks: int) -> tuple[int, list[int]]:
    """(number of pairs that fold, ranks that are left)."""
    extra = ranks - (1 << ranks.bit_length() - 1)
    return extra, [*range(0, 2 * extra, 2), *range(2 * extra, ranks)]


def folded(ranks: int, rounds: Rounds, chunks: int) -> Rounds:
    """All-reduce on the ranks that are left. Before it, odd ranks of pairs give everything to their partners."""
    extra, order = left(ranks)
    rounds = embed(rounds, order)
    if not extra:
        return rounds
    everything = range(chunks)
    fold = [tuple(Move(2 * i + 1, 2 * i, everything, True) for i in range(extra))]
    return fold + rounds + reverse(fold, False)


def butterfly(shape: Shape) -> Rounds:
    return folded(shape.ranks, doubling(left_chunks(shape)), 1)


def left_chunks(shape: Shape) -> int:
    return len(left(shape.ranks)[1])


def halving_doubling(shape: Shape) -> Rounds:
    chunks = left_chunks(shape)
    rounds = halving(chunks)
    return folded(shape.ranks, rounds + reverse(rounds, False), chunks)


def rabenseifner(shape: Shape) -> Rounds:
    """As `halving_doubling`, nearest partners first; pairs that fold share their sum's work, half of it each."""
    extra, order = left(shape.ranks)
    chunks, bits = len(order), log2(len(order))
    # The nearest partner first, so that the largest messages go the shortest way: rank r ends with the chunk of its
    # number's bits in reverse order
    reversed_bits = [int(f"{r:0{bits}b}"[::-1], 2) if bits else 0 for r in range(chunks)]
    scatter = embed(embed(halving(chunks), reversed_bits), order)
    rounds = scatter + reverse(scatter, False)
    if not extra:
        return rounds
    lower, upper = range(chunks // 2), range(chunks // 2, chunks)
    pairs = [(2 * i, 2 * i + 1) for i in range(extra)]
    halves = [move for a, b in pairs for move in (Move(a, b, upper, True), Move(b, a, lower, True))]
    back = tuple(Move(b, a, upper) for a, b in pairs)
    return [tuple(halves), back, *rounds, tuple(Move(a, b, range(chunks)) for a, b in pairs)]


def dissemination(ranks: int) -> Rounds:
    """Barrier: signals to the ranks 1, 2, 4, ... further on (Hensgen, Finkel, Manber 1988)."""
    return [
        tuple(Move(r, (r + (1 << k)) % ranks, ALL, True) for r in range(ranks)) for k in range(log2(ranks))
    ]


def _one_level(shape: Shape, levels: Levels) -> tuple[float, float] | None:
    """(latency, bandwidth) if all partners are equally far, else None."""
    if shape.nodes == 1:
        return levels.near.latency, levels.pair
    return levels.far if shape.local == 1 else None


def _two_powers(shape: Shape) -> bool:
    return power_of_two(shape) and not shape.local & (shape.local - 1)


def butterfly_line(shape: Shape, levels: Levels) -> Line | None:
    extra = 2 * bool(left(shape.ranks)[0])
    if level := _one_level(shape, levels):
        rounds = shape.ranks.bit_length() - 1 + extra
        return Line(rounds * level[0], rounds / level[1])
    if not _two_powers(shape):
        return None
    near, far = log2(shape.local), log2(shape.nodes)
    return Line(
        near * levels.near.latency + far * levels.far.latency,
        near / levels.pair + far / min(levels.near.bandwidth, levels.far.bandwidth),
    )


def rabenseifner_line(shape: Shape, levels: Levels) -> Line | None:
    extra, order = left(shape.ranks)
    if level := _one_level(shape, levels):
        rounds, sent = 2 * log2(len(order)), 2 * (1 - 1 / len(order))
        if extra:
            rounds, sent = rounds + 3, sent + 2
        return Line(rounds * level[0], sent / level[1])
    if not _two_powers(shape):
        return None
    near, far = 1 - 1 / shape.local, 1 / shape.local - 1 / shape.ranks
    return Line(
        2 * (log2(shape.local) * levels.near.latency + log2(shape.nodes) * levels.far.latency),
        2 * (near / levels.pair + far / min(levels.near.bandwidth, levels.far.bandwidth)),
    )


ALGORITHMS = (
    Algorithm(
        "all_reduce", "butterfly", butterfly, one, "small messages: fewest rounds", THAKUR,
        line=butterfly_line,
    ),
    Algorithm(
        "all_reduce", "halving_doubling", halving_doubling, left_chunks,
        "medium and large messages, all links equal", THAKUR,
    ),
    Algorithm(
        "all_reduce", "rabenseifner", rabenseifner, left_chunks,
        "medium and large messages, near links faster", RABENSEIFNER, line=rabenseifner_line,
    ),
    Algorithm(
        "reduce_scatter", "halving", lambda s: halving(s.ranks), each_rank, "small messages", THAKUR,
        fits=power_of_two, needs="a power of two",
    ),
    Algorithm(
        "all_gather", "doubling", lambda s: reverse(halving(s.ranks), False), each_rank, "small messages", THAKUR,
        fits=power_of_two, needs="a power of two",
    ),
    Algorithm(
        "all_gather", "bruck", lambda s: bruck(s.ranks), each_rank, "small messages, any number of ranks",
        "Bruck et al. 1997, Efficient algorithms for all-to-all communications",
    ),
    Algorithm(
        "reduce_scatter", "bruck", lambda s: reverse(bruck(s.ranks), True), each_rank,
        "small messages, any number of ranks",
    ),
    Algorithm(
        "barrier", "dissemination", lambda s: dissemination(s.ranks), one, "fewest rounds",
        "Hensgen, Finkel, Manber 1988, Two algorithms for barrier synchronization",
    ),
)  # fmt: skip
