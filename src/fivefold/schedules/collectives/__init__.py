"""Collectives as data: rounds of moves, generated, proven, priced on a topology and drawn. No torch."""

from fivefold.schedules.collectives.collective import (
    Collective,
    Levels,
    Line,
    Move,
    Primitive,
    Wire,
    prove,
)
from fivefold.schedules.collectives.registry import ALGORITHMS, PRIMITIVES, algorithm, build, shape_of
