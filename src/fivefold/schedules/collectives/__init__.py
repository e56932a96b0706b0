"""Collectives as data: rounds of moves, generated, proven, priced on a topology and drawn. No torch."""

from fivefold.schedules.collectives.algorithm import Algorithm, Levels, Line, Shape, Wire
from fivefold.schedules.collectives.check import prove
from fivefold.schedules.collectives.move import Collective, Group, Move, Primitive, Round
from fivefold.schedules.collectives.registry import ALGORITHMS, PRIMITIVES, algorithm, build, shape_of
