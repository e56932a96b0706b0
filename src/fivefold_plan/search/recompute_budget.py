"""Chooses what each block recomputes so that a rank's memory stays within `layout.recompute = "budget:6GiB"`.

A block can keep more or less. Of all modes those count that no other beats in bytes and seconds together: the corners
of a convex curve. From corner to corner a block frees bytes for seconds. Blocks go along it, cheapest bytes first,
until the formula says that the rank fits. The first blocks of a rank go first: when backward reaches them, the others
have freed what they kept. Each pipeline position is resolved by itself, so the last ranks, with fewer live
microbatches, keep more. All ranks of a position compute the same choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from fivefold.errors import UserError
from fivefold.models.recomputation import BUDGET, MODES, OPERATIONS, PREFIX, UNITS, runs_of
from fivefold_plan.memory.memory import Memory, Predictor
from fivefold_plan.setting import Setting
from fivefold_plan.time import offload, stage_costs

MARGIN = 0.05
"""Share of the budget that is left for the formula's error: the most that tests allow it."""


@dataclass(frozen=True)
class Budget:
    """A resolved budget. recompute: as `layout.recompute` has it. memory: predicted, per pipeline position."""

    bytes: int
    recompute: str
    memory: list[Memory]

    @property
    def peak(self) -> float:
        """Predicted bytes of the rank with most."""
        return max(one.total for one in self.memory)

    def line(self, asked: str) -> str:
        """One line for people. asked: the budget as the recipe has it."""
        return f'recompute = "{asked}": {self.recompute}, at most {_size(self.peak)} per rank as predicted'


def candidates() -> list[str]:
    """All modes of a block."""
    counts = range(1, len(OPERATIONS) + 1)
    return [*MODES, *(PREFIX + "+".join(ops) for count in counts for ops in combinations(OPERATIONS, count))]


def resolve(s: Setting, bytes: int, margin: float = MARGIN) -> Budget:
    """The modes of all blocks that keep a rank within a budget, for the fewest seconds. margin: share of the budget
    that is left free.

    Raises:
        UserError: it is too small. The message names the smallest possible one.
    """
    predictor = Predictor(s)
    ways = [_way(s, predictor, position) for position in range(s.layout.pp)]
    room = bytes * (1 - margin)

    def held(counts: Sequence[int]) -> list[Memory]:
        return offload.held(s, predictor.of(_modes(s, ways, counts)))

    # the fewest steps of each position that fit, by bisection: if more steps never need more memory
    last = [len(way) for way in ways]
    low, counts = [0] * len(last), list(last)
    while any(a < b for a, b in zip(low, counts, strict=True)):
        middle = [(a + b) // 2 for a, b in zip(low, counts, strict=True)]
        for position, one in enumerate(held(middle)):
            if one.total <= room:
                counts[position] = middle[position]
            elif low[position] < counts[position]:
                low[position] = middle[position] + 1
    if any(one.total > room for one in held(counts)):  # more steps may need more, for what is made again
        counts = _first(held, last, room)
    found = held(counts)
    if (peak := max(one.total for one in found)) > room:
        smallest = int(peak / (1 - margin)) + 1
        raise UserError(
            f'layout.recompute = "{BUDGET}{_size(bytes)}" is too small for this layout: a rank needs '
            f"{_size(smallest, True)}, {margin:.0%} of it for errors of the formula, if blocks recompute all that they "
            f'can. Nearest valid: "{BUDGET}{_size(smallest, True)}"'
        )
    return Budget(bytes, runs_of(_modes(s, ways, counts)), found)


def _first(held: Callable[[Sequence[int]], list[Memory]], last: Sequence[int], room: float) -> list[int]:
    """The fewest steps of each position that fit; where none do, those that need least."""
    found, least = [0] * len(last), [math.inf] * len(last)
    for count in range(max(last) + 1):
        for position, one in enumerate(held([min(count, most) for most in last])):
            if least[position] > room and one.total < least[position]:
                found[position], least[position] = min(count, last[position]), one.total
    return found


def _way(s: Setting, predictor: Predictor, position: int) -> list[tuple[int, str]]:
    """The steps of a pipeline position from keeping everything to keeping least: (block, its next mode)."""
    shared, blocks = stage_costs.parts(s), s.blocks(position)
    curves: dict[bool, list[tuple[float, str]]] = {}  # by kind of block, (seconds per freed byte, mode)
    for number in blocks:
        if (kind := predictor.second[number]) in curves:
            continue
        points = {
            mode: (predictor.kept(mode, number), stage_costs.computed(s, kind, shared, mode).seconds)
            for mode in candidates()
        }
        (kept, seconds), curve = points["none"], []
        while ahead := [
            ((t - seconds) / (kept - size), size, mode) for mode, (size, t) in points.items() if size < kept
        ]:
            price, kept, mode = min(ahead)  # of equal prices the one that frees most
            seconds = points[mode][1]
            curve.append((max(price, 0.0), mode))
        curves[kind] = curve
    steps = [
        (price, order, number, mode)
        for number in blocks
        for order, (price, mode) in enumerate(curves[predictor.second[number]])
    ]
    return [(number, mode) for _, _, number, mode in sorted(steps, key=lambda step: step[:3])]


def _modes(s: Setting, ways: Sequence[Sequence[tuple[int, str]]], counts: Sequence[int]) -> list[str]:
    """The modes after so many steps at each position."""
    modes = ["none"] * s.model.blocks
    for way, count in zip(ways, counts, strict=True):
        for number, mode in way[:count]:
            modes[number] = mode
    return modes


def _size(bytes: float, up: bool = False) -> str:
    """Bytes as a budget is written: `6.25GiB`. up: rounded up."""
    for name, unit in [*UNITS.items()][3:0:-1]:
        if bytes >= unit:
            hundredths = -(-int(bytes * 100) // unit) if up else round(bytes * 100 / unit)
            return f"{hundredths / 100:g}{name}"
    return f"{int(bytes)}B"


def recomputing(s: Setting, budget: Budget) -> Setting:
    """The setting with its blocks recomputing as a budget was resolved."""
    return replace(s, layout=replace(s.layout, recompute=budget.recompute))
