"""The algorithms there are, how to build one, and which ones a run uses (`layout.all_reduce`, `layout.all_gather`,
`layout.reduce_scatter`). Each file in `families/` has a table of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import get_args

from fivefold.errors import UserError, did_you_mean
from fivefold.schedules.collectives.collective import Algorithm, Collective, Primitive, Shape

PRIMITIVES: tuple[Primitive, ...] = get_args(Primitive)
ALGORITHMS: dict[Primitive, dict[str, Algorithm]] = {primitive: {} for primitive in PRIMITIVES}
"""By primitive and name."""
for _file in sorted((Path(__file__).parent / "families").glob("[!_]*.py")):
    for _algorithm in import_module(f"fivefold.schedules.collectives.families.{_file.stem}").ALGORITHMS:
        ALGORITHMS[_algorithm.primitive][_algorithm.name] = _algorithm


def algorithm(primitive: str, name: str) -> Algorithm:
    """The algorithm with this name. Raises UserError: there is no such primitive, or it has no such algorithm."""
    known = ALGORITHMS[check_primitive(primitive)]
    if name not in known:
        near = did_you_mean(name, known)
        raise UserError(f"{primitive}: algorithm '{name}' is unknown{near} (valid: {', '.join(known)})")
    return known[name]


def check_primitive(name: str) -> Primitive:
    """The primitive with this name. Raises UserError: there is none."""
    for primitive in PRIMITIVES:
        if primitive == name:
            return primitive
    near = did_you_mean(name, PRIMITIVES)
    raise UserError(f"primitive: '{name}' is unknown{near} (valid: {', '.join(PRIMITIVES)})")


def shape_of(ranks: int, local: int = 0, grid: tuple[int, ...] = (), pieces: int = 1, root: int = 0) -> Shape:
    """The shape with these ranks. local: ranks per node; 0 or more than there are: one node. Raises UserError: an
    impossible number."""
    if ranks < 1:
        raise UserError(f"ranks: {ranks} is not possible; must be at least 1")
    if local < 0:
        raise UserError(f"ranks per node: {local} is not possible; must be at least 1")
    if not 0 <= root < ranks:
        raise UserError(f"root: there is no rank {root}; the last of {ranks} ranks is {ranks - 1}")
    if pieces < 1:
        raise UserError(f"pieces: {pieces} is not possible; must be at least 1")
    if grid and math.prod(grid) != ranks:
        text = "x".join(map(str, grid))
        raise UserError(f"grid: {text} has {math.prod(grid)} ranks, not {ranks}")
    return Shape(ranks, min(local, ranks) or ranks, grid, pieces, root)


@cache
def build(primitive: str, name: str, shape: Shape | int, rank: int | None = None) -> Collective:
    """Builds the schedule of algorithm `name`. rank: the only one whose moves are asked for (`Algorithm.alone`).

    Raises:
        UserError: unknown primitive or algorithm, or a number of ranks that it is not for. The message names the
        nearest numbers.
    """
    made = algorithm(primitive, name)
    shape = shape_of(shape) if isinstance(shape, int) else shape
    if rank is not None and not made.alone:
        return build(primitive, name, shape)
    if made.fits(shape):
        rounds = tuple(made.rounds(shape, *([rank] * made.alone))) if shape.ranks > 1 else ()
        chunks, streams = made.chunks(shape), made.streams(shape)
        return Collective(
            made.primitive, name, shape.ranks, chunks, rounds, shape.root, streams, made.switches, rank
        )
    below, above = range(shape.ranks - 1, 0, -1), range(shape.ranks + 1, 2 * shape.ranks + 8)
    nearest = [
        next((n for n in side if made.fits(shape._replace(ranks=n, grid=()))), None)
        for side in (below, above)
    ]
    raise UserError(
        f"{primitive} '{name}' needs {made.needs} as its number of ranks"
        f"{f' ({shape.local})' if 'per node' in made.needs else ''}, not {shape.ranks}; "
        f"the nearest: {' or '.join(str(n) for n in nearest if n)}"
    )


LIBRARY, AUTO = "library", "auto"
ALL_REDUCES = (LIBRARY, *(n for n, made in ALGORITHMS["all_reduce"].items() if not made.switches), AUTO)
GATHERS, SCATTERS = ((LIBRARY, *ALGORITHMS[primitive]) for primitive in ("all_gather", "reduce_scatter"))
CHOICES: dict[Primitive, tuple[str, ...]] = {
    "all_reduce": ALL_REDUCES,
    "all_gather": GATHERS,
    "reduce_scatter": SCATTERS,
}
"""What a layout may name for a primitive, in its field of that name."""
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


def chosen(
    name: str,
    ranks: int,
    local: int,
    size: int,
    best: Best | None = None,
    primitive: Primitive = "all_reduce",
    rank: int | None = None,
) -> Collective | None:
    """The schedule that sums, gathers or scatters `size` bytes over a group of ranks; None: the library's own.

    name: one of its CHOICES. local: ranks of the group on each node. best: what "auto" goes by. rank: as in `build`.
    Raises UserError: the algorithm is not for so many ranks."""
    if name == AUTO:
        name = fastest(best or {}, size)
    if ranks == 1 or name == LIBRARY:
        return None
    pieces = pieces_of(algorithm(primitive, name), size)
    return build(primitive, name, shape_of(ranks, local, pieces=pieces), rank)


def fastest(best: Best, size: int) -> str:
    """The fastest all-reduce at the measured size that is nearest to `size`."""
    near = min(best, key=lambda measured: abs(math.log(measured / max(1, size))), default=None)
    return LIBRARY if near is None else best[near]


def pieces_of(made: Algorithm, size: int) -> int:
    """Into how many pieces a pipelined algorithm cuts a message of `size` bytes; 1 if it is not pipelined."""
    return min(made.pieces[-1], max(1, size // PIECE)) if len(made.pieces) > 1 else 1


def algorithm_problem(primitive: Primitive, name: str, ranks: int) -> str | None:
    """What is wrong with an algorithm for so many ranks, in words; None: nothing."""
    shape = shape_of(ranks)
    if name in (LIBRARY, AUTO) or algorithm(primitive, name).fits(shape):
        return None
    try:
        build(primitive, name, shape)
    except UserError as error:
        fitting = [other.name for other in ALGORITHMS[primitive].values() if other.fits(shape)]
        return f"{error}; for {ranks} ranks: {LIBRARY}, {', '.join(fitting)}"
    return None
