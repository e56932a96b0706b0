"""From which size on messages hide behind computing: a rule, its threshold by a formula and by the planner."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from fivefold.plan.cost import Setting

FACTORS = tuple(2.0**k for k in range(-4, 5))
"""Sizes beside the recipe's own for which the planner is asked, too."""


class Ratio(NamedTuple):
    """Seconds of messages over seconds of computing, by the formula. inputs: its symbols with their values."""

    value: float
    inputs: dict[str, float]


@dataclass(frozen=True)
class Rule:
    """The rule of one technique for a setting.

    what: what is sent, and what hides it. variable: the size that decides. now, needed: its value, and the threshold.
    ratio: seconds of messages over seconds of computing by the formula, and `planned` by the planner. limit: the ratio
    at the threshold. overlaps: True if this program runs the messages beside the computing; otherwise it waits for
    them. points: (size, ratio) by the planner. inputs: the formula's symbols.
    """

    technique: str
    axis: str
    what: str
    variable: str
    now: float
    needed: float
    ratio: float
    planned: float
    limit: float
    overlaps: bool
    formula: str
    inputs: dict[str, float]
    source: str
    points: tuple[tuple[float, float], ...]

    @property
    def hides(self) -> bool:
        """True if the size is large enough by the planner's figures, whether or not this program overlaps."""
        return self.planned <= self.limit

    @property
    def crossing(self) -> float:
        """The size at which the planner's own figures reach the limit, on a line between them; 0 if all of them are
        below it, infinite if the largest is still above."""
        found = sorted(self.points)
        if not found or found[-1][1] > self.limit:
            return math.inf
        for (x, above), (y, below) in pairwise(found):
            if above > self.limit >= below:
                part = math.log(above / self.limit) / math.log(above / below) if below else 1.0
                return x * (y / x) ** part
        return 0.0

    @property
    def verdict(self) -> str:
        if not self.hides:
            return "sticks out"
        return "hides" if self.overlaps else "could hide, but the program waits"

    def as_json(self) -> dict[str, Any]:
        crossing = self.crossing if math.isfinite(self.crossing) else None
        return vars(self) | {"hides": self.hides, "needed_by_planner": crossing}


@dataclass(frozen=True)
class Kind:
    """A rule for any setting. size: the value of `variable`. by_formula, planned: ratios. resized: the setting with the
    size times a factor, or None if that is not possible."""

    technique: Callable[[Setting], str]
    axis: str
    what: Callable[[Setting], str]
    variable: str
    formula: Callable[[Setting], str]
    source: str
    applies: Callable[[Setting], bool]
    overlaps: Callable[[Setting], bool]
    size: Callable[[Setting], float]
    by_formula: Callable[[Setting], Ratio]
    planned: Callable[[Setting], float]
    resized: Callable[[Setting, float], Setting | None]
    limit: float = 1.0

    def rule(self, s: Setting) -> Rule:
        found, now = self.by_formula(s), self.size(s)
        sized = (self.resized(s, factor) for factor in FACTORS)
        points = tuple((self.size(one), self.planned(one)) for one in sized if one)
        needed = now * found.value / self.limit
        return Rule(
            self.technique(s), self.axis, self.what(s), self.variable, now, needed, found.value, self.planned(s),
            self.limit, self.overlaps(s), self.formula(s), found.inputs, self.source, points,
        )  # fmt: skip
