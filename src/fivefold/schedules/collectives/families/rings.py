"""Rings: every rank sends to the next one. Least bytes, most rounds.

On several nodes there is one ring per device of a node ("channel", as in NCCL). Channel k visits a node's devices
beginning with the k-th, so each ring leaves the node through another device's network card.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fivefold.schedules.collectives.collective import (
    Algorithm,
    Levels,
    Line,
    Move,
    Rounds,
    Shape,
    beside,
    embed,
    reverse,
)

BANDWIDTH = "Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms"


def gather(ranks: int, alone: int | None = None, step: int = 1) -> Rounds:
    """All-gather: in round t, rank r passes on the chunk that it got in the round before. alone: the rank that sends or
    receives; None: any."""
    some = range(ranks) if alone is None else ((alone - step) % ranks, alone)
    return [
        tuple(Move(r, (r + step) % ranks, one((r - t * step) % ranks)) for r in some)
        for t in range(ranks - 1)
    ]


def scatter(ranks: int, alone: int | None = None) -> Rounds:
    """Reduce-scatter, in the same direction."""
    return reverse(gather(ranks, alone, -1), reduce=True)


def one(chunk: int) -> range:
    return range(chunk, chunk + 1)


def channels(shape: Shape) -> int:
    return shape.local if shape.ranks > shape.local and shape.ranks % shape.local == 0 else 1


def chunks(shape: Shape) -> int:
    return shape.ranks * channels(shape)


def _all_channels(ring: Callable[[int, int | None], Rounds], shape: Shape, alone: int | None) -> Rounds:
    """Each channel does the rounds of a ring with its part of every rank's chunk."""
    count, local = channels(shape), shape.local
    if count == 1:
        return ring(shape.ranks, alone)
    parts = []
    for k in range(count):
        order = [r // local * local + (r + k) % local for r in range(shape.ranks)]
        rounds = ring(shape.ranks, None if alone is None else order.index(alone))
        parts.append(embed(rounds, order, lambda c, k=k, order=order: (order[c] * count + k,)))
    return beside(*parts)


def all_gather(shape: Shape, alone: int | None = None) -> Rounds:
    return _all_channels(gather, shape, alone)


def reduce_scatter(shape: Shape, alone: int | None = None) -> Rounds:
    return _all_channels(scatter, shape, alone)


def keys_then_values(shape: Shape) -> Rounds:
    """All-gather of two chunks per rank: the first of every rank goes all around before any second one does. Attention
    needs all keys for its softmax, and values only behind it."""
    once, ranks = gather(shape.ranks), range(shape.ranks)
    return embed(once, ranks, lambda c: (2 * c,)) + embed(once, ranks, lambda c: (2 * c + 1,))


def all_reduce(shape: Shape, alone: int | None = None) -> Rounds:
    return reduce_scatter(shape, alone) + all_gather(shape, alone)


def _line(turns: int, shape: Shape, levels: Levels) -> Line:
    """The longest way has `turns` (n - 1) hops along the ring. One hop per node leaves it."""
    hops = turns * (shape.ranks - 1)
    latency, bandwidth = hops * levels.near.latency, levels.near.bandwidth
    if shape.nodes > 1:
        # The way leaves out `turns` neighbouring hops. The longest leaves out those that stay in their node.
        far = hops if shape.local == 1 else turns * shape.nodes - max(0, turns + 1 - shape.local)
        latency = far * levels.far.latency + (hops - far) * levels.near.latency
        rails = shape.local * levels.far.bandwidth
        bandwidth = rails if shape.local == 1 else min(bandwidth, rails)
    return Line(latency, turns * (shape.ranks - 1) / shape.ranks / bandwidth)


one_turn, two_turns = partial(_line, 1), partial(_line, 2)
ALGORITHMS = (
    Algorithm(
        "all_gather", "ring", all_gather, chunks, "large messages", BANDWIDTH, streams=channels, line=one_turn,
        alone=True,
    ),
    Algorithm(
        "all_gather", "keys_then_values", keys_then_values, lambda s: 2 * s.ranks,
        "ring self-attention: keys pass by, then values", "Li et al. 2021, arXiv 2105.13120",
    ),
    Algorithm(
        "reduce_scatter", "ring", reduce_scatter, chunks, "large messages", BANDWIDTH, streams=channels, line=one_turn,
        alone=True,
    ),
    Algorithm(
        "all_reduce", "ring", all_reduce, chunks,
        "large messages, any number of ranks", BANDWIDTH,
        streams=channels, line=two_turns, alone=True,
    ),
)  # fmt: skip
