"""Collectives on grids: nodes and their devices, tori, meshes.

An all-reduce on a grid is a reduce-scatter along each dim in turn, with less and less data, and the same back as
all-gathers. The plain variants move whole messages instead: `leaders` and `mesh_2d_whole`. Ranks are numbered with the
last dim next to each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product

from fivefold.schedules.collectives.collective import (
    Algorithm,
    Levels,
    Line,
    Move,
    Rounds,
    Shape,
    beside,
    each_rank,
    embed,
    even_grid,
    full_nodes,
    log2,
    reverse,
)
from fivefold.schedules.collectives.families import halving, rings
from fivefold.schedules.collectives.families.rooted import binomial

MIKAMI = "Mikami et al. 2018, arXiv 1811.05233"


def line(ranks: int) -> Rounds:
    """Reduce-scatter on a line without wrap-around: sums for chunk c come to rank c from both ends."""
    moves: list[list[Move]] = [[] for _ in range(ranks - 1)]
    for chunk in range(ranks):
        for r in range(chunk):
            moves[r + ranks - 1 - chunk].append(Move(r, r + 1, rings.one(chunk), True))
        for r in range(chunk + 1, ranks):
            moves[ranks - 1 - r + chunk].append(Move(r, r - 1, rings.one(chunk), True))
    return [tuple(some) for some in moves]


def shortest(ranks: int) -> Rounds:
    """Reduce-scatter in the fewest rounds: halving on a power of two, else a ring."""
    return rings.scatter(ranks) if ranks & (ranks - 1) else halving.halving(ranks)


def grid_scatter(grid: tuple[int, ...], scatter: Callable[[int], Rounds]) -> Rounds:
    """Reduce-scatter along the last dim, then with what each rank has left along the one before, and so on."""
    rounds: Rounds = []
    width, held = math.prod(grid), [0] * math.prod(grid)  # chunks that a rank still sums: held, held + 1, ...
    for dim in reversed(range(len(grid))):
        size, parts = grid[dim], []
        width //= size
        for ranks in lines(grid, dim):
            begin = held[ranks[0]]
            parts.append(
                embed(scatter(size), ranks, lambda c, b=begin, w=width: range(b + c * w, b + c * w + w))
            )
            for place, rank in enumerate(ranks):
                held[rank] += place * width
        rounds += beside(*parts)
    return rounds


def lines(grid: tuple[int, ...], dim: int) -> Iterator[list[int]]:
    """The ranks of every line along a dim, in order."""
    strides = [math.prod(grid[i + 1 :]) for i in range(len(grid))]
    for place in product(*(range(size) for i, size in enumerate(grid) if i != dim)):
        there = [*place[:dim], 0, *place[dim:]]
        start = sum(at * stride for at, stride in zip(there, strides, strict=True))
        yield [start + at * strides[dim] for at in range(grid[dim])]


def grid_all_reduce(grid: tuple[int, ...], scatter: Callable[[int], Rounds]) -> Rounds:
    rounds = grid_scatter(grid, scatter)
    return rounds + reverse(rounds, False)


def whole_all_reduces(grid: tuple[int, ...]) -> Rounds:
    """An all-reduce of the whole message along the last dim, then one of the sums along the one before, and so on."""
    rounds: Rounds = []
    for dim, size in reversed([*enumerate(grid)]):
        width, scatter = math.lcm(*grid) // size, line(size)
        both = scatter + reverse(scatter, False)
        parts = (embed(both, ranks, lambda c, w=width: range(c * w, c * w + w)) for ranks in lines(grid, dim))
        rounds += beside(*parts)
    return rounds


def leaders(shape: Shape) -> Rounds:
    """Each node sums on its first rank, the leaders sum among themselves, and each node gets its leader's sum."""
    nodes, local = shape.nodes, shape.local
    inside = [
        embed(binomial(local), range(first, first + local), lambda c: range(nodes))
        for first in range(0, shape.ranks, local)
    ]
    down = beside(*inside)
    across = embed(grid_all_reduce((nodes,), shortest), range(0, shape.ranks, local))
    return reverse(down, True) + across + down


def grid_of(shape: Shape, dims: int) -> tuple[int, ...] | None:
    """The grid with so many dims: that of the shape, else the most even one. dims: 0 for any: without a grid in the
    shape, the most that its ranks have factors for, but at least two."""
    if len(shape.grid) == (dims or len(shape.grid)) > 1 and math.prod(shape.grid) == shape.ranks:
        return shape.grid
    if dims:
        return even_grid(shape.ranks, dims)
    rest, factor, sizes = shape.ranks, 2, list[int]()
    while rest > 1:
        if factor * factor > rest:
            factor = rest
        while rest % factor == 0:
            rest, sizes = rest // factor, [*sizes, factor]
        factor += 1
    return tuple(sizes) if len(sizes) > 1 else None


def hierarchical_gather(shape: Shape) -> Rounds:
    """All-gather across nodes first, between the devices with one place in their nodes; then inside, where every device
    passes on what it got from all nodes. So each network card carries a chunk of each node only once."""
    nodes, local = shape.nodes, shape.local
    across = [
        embed(reverse(shortest(nodes), False), range(j, shape.ranks, local), lambda c, j=j: (c * local + j,))
        for j in range(local)
    ]
    inside = [
        embed(
            reverse(shortest(local), False),
            range(i * local, (i + 1) * local),
            lambda c: range(c, shape.ranks, local),
        )
        for i in range(nodes)
    ]
    return beside(*across) + beside(*inside)


def _steps(ranks: int) -> int:
    return ranks - 1 if ranks & (ranks - 1) else log2(ranks)


def _hierarchical_line(turns: int) -> Callable[[Shape, Levels], Line | None]:
    def cost(shape: Shape, levels: Levels) -> Line | None:
        if not full_nodes(shape):
            return None
        nodes, local = shape.nodes, shape.local
        alpha = _steps(local) * levels.near.latency + _steps(nodes) * levels.far.latency
        near = (1 - 1 / local) / levels.pair
        far = (1 / local - 1 / shape.ranks) / min(levels.near.bandwidth, levels.far.bandwidth)
        return Line(turns * alpha, turns * (near + far))

    return cost


def _fits(dims: int) -> Callable[[Shape], bool]:
    return lambda shape: grid_of(shape, dims) is not None


def _grid(shape: Shape, dims: int) -> tuple[int, ...]:
    """The grid of ranks that fit one; one rank is alone."""
    return grid_of(shape, dims) or (1,)


def _on_grid(dims: int, scatter: Callable[[int], Rounds]) -> Callable[[Shape], Rounds]:
    return lambda shape: grid_all_reduce(_grid(shape, dims), scatter)


NODES = "a multiple of the ranks per node"
ALGORITHMS = (
    Algorithm(
        "all_reduce", "hierarchical", lambda s: grid_all_reduce((s.nodes, s.local), shortest), each_rank,
        "several nodes: each card carries only its part", MIKAMI,
        full_nodes, NODES, line=_hierarchical_line(2),
    ),
    Algorithm(
        "all_gather", "hierarchical", hierarchical_gather, each_rank, "several nodes, small and medium messages", "",
        full_nodes, NODES, line=_hierarchical_line(1),
    ),
    Algorithm(
        "reduce_scatter", "hierarchical", lambda s: reverse(hierarchical_gather(s), True), each_rank,
        "several nodes, small and medium messages", "", full_nodes, NODES, line=_hierarchical_line(1),
    ),
    Algorithm(
        "all_reduce", "torus_2d", _on_grid(2, rings.scatter), each_rank,
        "a torus: rings along rows, then columns", MIKAMI, _fits(2), "a product of two numbers", grids=2,
    ),
    Algorithm(
        "all_reduce", "mesh_2d", _on_grid(2, line), each_rank,
        "a grid without wrap-around", "Ying et al. 2018, arXiv 1811.06992", _fits(2),
        "a product of two numbers", grids=2,
    ),
    Algorithm(
        "all_reduce", "torus_3d", _on_grid(3, rings.scatter), each_rank, "a torus with three dims", MIKAMI, _fits(3),
        "a product of three numbers", grids=3,
    ),
    Algorithm(
        "all_reduce", "torus", _on_grid(0, rings.scatter), each_rank, "a torus with any number of dims", MIKAMI,
        _fits(0), "a product of two or more numbers",
    ),
    Algorithm(
        "all_reduce", "leaders", leaders, lambda s: s.nodes, "several nodes with one card each, small messages",
        "Jia et al. 2018, arXiv 1807.11205", full_nodes, NODES,
    ),
    Algorithm(
        "all_reduce", "mesh_2d_whole", lambda s: whole_all_reduces(_grid(s, 2)),
        lambda s: math.lcm(*_grid(s, 2)), "to compare: whole messages along rows, then columns",
        fits=_fits(2), needs="a product of two numbers", grids=2,
    ),
)  # fmt: skip
