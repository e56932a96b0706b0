"""All-to-all, and the all-gather by broadcasts that ZeRO-3 began with."""

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
    full_nodes,
    log2,
    power_of_two,
    ranges,
)
from fivefold.schedules.collectives.families.rings import one
from fivefold.schedules.collectives.families.rooted import THAKUR, binomial


def direct(shape: Shape) -> Rounds:
    """Everyone sends to everyone at once."""
    n = shape.ranks
    moves = tuple(Move(s, (s + t) % n, one(s * n + (s + t) % n)) for t in range(1, n) for s in range(n))
    return [moves] if moves else []


def pairwise(shape: Shape) -> Rounds:
    """In round t, everyone sends to the rank t further on."""
    n = shape.ranks
    return [tuple(Move(s, (s + t) % n, one(s * n + (s + t) % n)) for s in range(n)) for t in range(1, n)]


def bruck(shape: Shape) -> Rounds:
    """A chunk travels as many ranks on as its way has bits: in round k, 2^k ranks if its distance has that bit."""
    n, rounds = shape.ranks, []
    for k in range(log2(n)):
        moves = []
        for r in range(n):
            sources = [((r - (o & (1 << k) - 1)) % n, o) for o in range(n) if o >> k & 1]
            chunks = sorted(s * n + (s + o) % n for s, o in sources)
            moves += [Move(r, (r + (1 << k)) % n, some) for some in ranges(chunks)]
        rounds.append(tuple(moves))
    return rounds


def hierarchical(shape: Shape) -> Rounds:
    """First inside the node, to the device with the destination's place; then across, one message per pair of nodes."""
    n, local = shape.ranks, shape.local
    inside, across = [], []
    for s in range(n):
        node, place = divmod(s, local)
        for there in range(local):
            if there != place:  # what s has for the devices in this place, of all nodes
                inside.append(Move(s, node * local + there, range(s * n + there, (s + 1) * n, local)))
        for other in range(shape.nodes):
            target = other * local + place
            if other != node:  # what this node has for that device, gathered here
                chunks = range(node * local * n + target, (node + 1) * local * n, n)
                across.append(Move(s, target, chunks))
    return [tuple(moves) for moves in (inside, across) if moves]


def broadcasts(shape: Shape) -> Rounds:
    """All-gather: one rank after the other broadcasts its chunk."""
    n = shape.ranks
    return [
        moves
        for root in range(n)
        for moves in embed(
            binomial(n), [(r + root) % n for r in range(n)], lambda _, root=root: (root,)
        )
    ]  # fmt: skip


def direct_line(shape: Shape, levels: Levels) -> Line:
    n, local = shape.ranks, shape.local
    alpha = (local - 1) * levels.near.latency + (n - local) * levels.far.latency
    inside = (local - 1) / levels.near.bandwidth
    if shape.nodes == 1:
        return Line(alpha, inside / n)
    port = (n - 1) / levels.near.bandwidth  # what leaves the node goes through the device's port, too
    return Line(alpha, max(port, (n - local) / levels.far.bandwidth) / n)


def bruck_line(shape: Shape, levels: Levels) -> Line | None:
    n, local, near, far = shape.ranks, shape.local, levels.near, levels.far
    if shape.nodes == 1 or local == 1:
        latency, bandwidth = far if local == 1 and n > 1 else (near.latency, levels.pair)
        bits = sum(o.bit_count() for o in range(n))
        return Line(log2(n) * latency, bits / n / bandwidth)
    if not power_of_two(shape) or local & (local - 1):
        return None
    # Of the steps 1, 2, ..., local / 2, whose sum is less than a node, a chunk leaves its node in at most one. But the
    # last device of a node sends to another node in all of them.
    outside = log2(shape.nodes) + 1
    alpha = (log2(n) - outside) * near.latency + outside * far.latency
    return Line(alpha, log2(n) / 2 / min(near.bandwidth, far.bandwidth))


def hierarchical_line(shape: Shape, levels: Levels) -> Line | None:
    if not full_nodes(shape):
        return None
    nodes, local = shape.nodes, shape.local
    return Line(
        (local - 1) * levels.near.latency + (nodes - 1) * levels.far.latency,
        (1 - 1 / local) / levels.near.bandwidth
        + (1 - 1 / nodes) / min(levels.near.bandwidth, levels.far.bandwidth),
    )


A2A = "all_to_all"
ALGORITHMS = (
    Algorithm(
        A2A, "direct", direct, lambda s: s.ranks**2, "most messages: one round", line=direct_line
    ),
    Algorithm(
        A2A, "pairwise", pairwise, lambda s: s.ranks**2, "large messages where many at once disturb each other", THAKUR
    ),
    Algorithm(
        A2A, "bruck", bruck, lambda s: s.ranks**2, "small messages on many ranks: log2 n messages per rank",
        "Bruck et al. 1997, Efficient algorithms for all-to-all communications", line=bruck_line,
    ),
    Algorithm(
        A2A, "hierarchical", hierarchical, lambda s: s.ranks**2, "several nodes: few messages between them", "",
        full_nodes, "a multiple of the ranks per node", line=hierarchical_line,
    ),
    Algorithm(
        "all_gather", "broadcasts", broadcasts, each_rank, "weights used one after the other, as in ZeRO-3",
        "arXiv 1910.02054, section 5.3",
    ),
)  # fmt: skip
