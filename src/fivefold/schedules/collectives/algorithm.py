"""What the registry knows of an algorithm: how to make its rounds, for which ranks, when to use it, what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from fivefold.schedules.collectives.move import Primitive, Rounds


class Shape(NamedTuple):
    """What a schedule is made for.

    ranks: how many. local: ranks on each node, next to each other. grid: the sizes of a torus or mesh, () for the most
    even ones. pieces: into how many pieces a pipelined algorithm cuts the message. root: see `Collective`.
    """

    ranks: int
    local: int
    grid: tuple[int, ...] = ()
    pieces: int = 1
    root: int = 0

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.local)


class Wire(NamedTuple):
    """A kind of link: seconds until the first byte arrives, and bytes/s in each direction."""

    latency: float
    bandwidth: float


class Levels(NamedTuple):
    """The two levels of a group: a device's link to its node, and its share of the node's links to other nodes. pair:
    the bandwidth between two devices of a node, less than all of it where each pair has its own wire."""

    near: Wire
    far: Wire
    pair: float


class Line(NamedTuple):
    """Seconds of a message of S bytes: `alpha + beta S`."""

    alpha: float
    beta: float


def full_nodes(shape: Shape) -> bool:
    return shape.ranks % shape.local == 0


def power_of_two(shape: Shape) -> bool:
    return shape.ranks & (shape.ranks - 1) == 0


def log2(ranks: int) -> int:
    """Rounds until all of n ranks are reached, if their number doubles in each."""
    return (ranks - 1).bit_length()


def one(shape: Shape) -> int:
    return 1


def each_rank(shape: Shape) -> int:
    return shape.ranks


@dataclass(frozen=True)
class Algorithm:
    """One way to carry out a primitive.

    rounds: its moves. chunks: into how many chunks it cuts the message. when: when to use it, for people. source: the
    paper. fits: the shapes it is for, and `needs` in words. pieces: numbers of pieces to choose from; (1,) if it is not
    pipelined. grids: number of dims of its grid, 0 without one. streams: as in `Collective`. line: its cost on two
    levels as a formula, for groups too large to be simulated, None if it has none or not for these ranks.
    """

    primitive: Primitive
    name: str
    rounds: Callable[[Shape], Rounds]
    chunks: Callable[[Shape], int]
    when: str
    source: str = ""
    fits: Callable[[Shape], bool] = lambda shape: True
    needs: str = ""
    pieces: tuple[int, ...] = (1,)
    grids: int = 0
    streams: Callable[[Shape], int] = one
    line: Callable[[Shape, Levels], Line | None] | None = None


def even_grid(ranks: int, dims: int) -> tuple[int, ...] | None:
    """The most even sizes of a grid, each at least 2; None if the number of ranks has too few factors."""
    if dims == 1:
        return (ranks,) if ranks > 1 else None
    found = []
    for first in range(2, math.isqrt(ranks) + 1):
        if ranks % first == 0 and (rest := even_grid(ranks // first, dims - 1)):
            found.append(tuple(sorted((first, *rest))))
    return min(found, key=lambda grid: grid[-1] - grid[0], default=None)
