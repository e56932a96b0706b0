"""The algorithm by which gradients are summed: `layout.all_reduce`, one of ALL_REDUCES."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fivefold.errors import UserError
from fivefold.schedules.collectives.algorithm import Algorithm
from fivefold.schedules.collectives.move import Collective
from fivefold.schedules.collectives.registry import ALGORITHMS, algorithm, build, shape_of

LIBRARY, AUTO = "library", "auto"
ALL_REDUCES = (LIBRARY, *ALGORITHMS["all_reduce"], AUTO)
PIECE = 1 << 18
"""Bytes of a piece of a pipelined algorithm, if there may be so many."""

Best = Mapping[int, str]
"""The fastest all-reduce by size in bytes, as measured; empty if nothing was."""


ACROSS = "hierarchical"
"""What "auto" takes for CPU ranks on several hosts. gloo's ring sends up to twice as much through each network card."""


def resolved(name: str, ranks: int, local: int, best: Best, cpu: bool) -> str:
    """What "auto" means for a group; other names mean themselves. local, best: see `chosen`.

    ACROSS: several CPU ranks on each of several hosts. AUTO: each size by `best`. LIBRARY: nothing was measured, or
    nothing was faster.
    """
    if name != AUTO or ranks == 1:
        return name
    if local < ranks:
        return ACROSS if cpu and local > 1 and ranks % local == 0 else LIBRARY
    return AUTO if any(measured != LIBRARY for measured in best.values()) else LIBRARY


def chosen(name: str, ranks: int, local: int, size: int, best: Best | None = None) -> Collective | None:
    """The schedule that sums `size` bytes over a group of ranks; None: the library's own.

    name: one of ALL_REDUCES. local: ranks of the group on each node. best: what "auto" goes by.

    Raises:
        UserError: the algorithm is not for so many ranks.
    """
    if name == AUTO:
        name = fastest(best or {}, size)
    if ranks == 1 or name == LIBRARY:
        return None
    pieces = pieces_of(algorithm("all_reduce", name), size)
    return build("all_reduce", name, shape_of(ranks, local, pieces=pieces))


def fastest(best: Best, size: int) -> str:
    """The fastest all-reduce at the measured size that is nearest to `size`."""
    near = min(best, key=lambda measured: abs(math.log(measured / max(1, size))), default=None)
    return LIBRARY if near is None else best[near]


def pieces_of(made: Algorithm, size: int) -> int:
    """Into how many pieces a pipelined algorithm cuts a message of `size` bytes; 1 if it is not pipelined."""
    return min(made.pieces[-1], max(1, size // PIECE)) if len(made.pieces) > 1 else 1


def problem(name: str, ranks: int) -> str | None:
    """What is wrong with an all-reduce for so many ranks, in words; None: nothing."""
    shape = shape_of(ranks)
    if name in (LIBRARY, AUTO) or algorithm("all_reduce", name).fits(shape):
        return None
    try:
        build("all_reduce", name, shape)
    except UserError as error:
        fitting = [other.name for other in ALGORITHMS["all_reduce"].values() if other.fits(shape)]
        return f"{error}; for {ranks} ranks: {LIBRARY}, {', '.join(fitting)}"
    return None
