"""The algorithms there are, and how to build one. Each file in `families/` has a table of its own."""

from __future__ import annotations

import math
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import get_args

from fivefold.errors import UserError, did_you_mean
from fivefold.schedules.collectives.algorithm import Algorithm, Shape
from fivefold.schedules.collectives.move import Collective, Primitive, Round

PRIMITIVES: tuple[Primitive, ...] = get_args(Primitive)
_FAMILIES = sorted(file.stem for file in (Path(__file__).parent / "families").glob("[!_]*.py"))
_PACKAGE = f"{__name__.rpartition('.')[0]}.families"


def _read() -> dict[Primitive, dict[str, Algorithm]]:
    found: dict[Primitive, dict[str, Algorithm]] = {primitive: {} for primitive in PRIMITIVES}
    for family in _FAMILIES:
        for algorithm in import_module(f"{_PACKAGE}.{family}").ALGORITHMS:
            found[algorithm.primitive][algorithm.name] = algorithm
    return found


ALGORITHMS = _read()
"""By primitive and name."""


def algorithm(primitive: str, name: str) -> Algorithm:
    """The algorithm with this name.

    Raises:
        UserError: there is no such primitive, or it has no such algorithm.
    """
    known = ALGORITHMS[check_primitive(primitive)]
    if name not in known:
        near = did_you_mean(name, known)
        raise UserError(f"{primitive}: algorithm '{name}' is unknown{near} (valid: {', '.join(known)})")
    return known[name]


def check_primitive(name: str) -> Primitive:
    """The primitive with this name.

    Raises:
        UserError: there is none.
    """
    for primitive in PRIMITIVES:
        if primitive == name:
            return primitive
    near = did_you_mean(name, PRIMITIVES)
    raise UserError(f"primitive: '{name}' is unknown{near} (valid: {', '.join(PRIMITIVES)})")


def shape_of(ranks: int, local: int = 0, grid: tuple[int, ...] = (), pieces: int = 1, root: int = 0) -> Shape:
    """The shape with these ranks. local: ranks per node; 0 or more than there are: one node.

    Raises:
        UserError: an impossible number.
    """
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


def build(primitive: str, name: str, shape: Shape | int) -> Collective:
    """Builds the schedule of algorithm `name`.

    Raises:
        UserError: unknown primitive or algorithm, or a number of ranks that it is not for. The message names the
        nearest numbers.
    """
    made = algorithm(primitive, name)
    shape = shape_of(shape) if isinstance(shape, int) else shape
    if not made.fits(shape):
        raise UserError(
            f"{primitive} '{name}' needs {made.needs} as its number of ranks"
            f"{f' ({shape.local})' if 'per node' in made.needs else ''}, not {shape.ranks}; "
            f"the nearest: {' or '.join(map(str, _nearest(made, shape)))}"
        )
    return _built(made, shape)


@cache
def _built(made: Algorithm, shape: Shape) -> Collective:
    rounds: list[Round] = made.rounds(shape) if shape.ranks > 1 else []
    return Collective(
        made.primitive,
        made.name,
        shape.ranks,
        made.chunks(shape),
        tuple(rounds),
        shape.root,
        made.streams(shape),
    )


def _nearest(made: Algorithm, shape: Shape) -> list[int]:
    """The next smaller and larger numbers of ranks that the algorithm is for."""

    def possible(ranks: int) -> bool:
        return made.fits(shape._replace(ranks=ranks, grid=()))

    below = next((n for n in range(shape.ranks - 1, 0, -1) if possible(n)), None)
    above = next((n for n in range(shape.ranks + 1, 2 * shape.ranks + 8) if possible(n)), None)
    return [n for n in (below, above) if n]
