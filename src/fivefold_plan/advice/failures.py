"""Failures of a long run: how often to save, and which share of the time trains. All times are in seconds.

Failures come at random, `between` apart on average. One takes `back` until training goes on, and what was trained
since the last checkpoint is repeated. Young, "A first order approximation to the optimum checkpoint interval",
Communications of the ACM 17(9), 1974; Daly, "A higher order estimate of the optimum checkpoint interval for restart
dumps", Future Generation Computer Systems 22(3), 2006.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable

LONGEST = 700.0  # intervals in units of `between` whose exponential is a number


def best_interval(saving: float, between: float) -> float:
    """Training between two checkpoints that loses least, if the run waits `saving` for each (Daly, equation 37). Its
    first term is Young's sqrt(2 * saving * between)."""
    if saving >= 2 * between:
        return between
    ratio = math.sqrt(saving / (2 * between))
    return math.sqrt(2 * saving * between) * (1 + ratio / 3 + ratio**2 / 9) - saving


def best_steps(goodput: Callable[[int], float], most: int) -> int:
    """The number of steps between checkpoints, up to `most`, with the most goodput, which rises up to it and falls from
    there on."""
    return 1 + bisect_left(range(1, most), True, key=lambda steps: goodput(steps + 1) <= goodput(steps))


def goodput(every: float, saving: float, between: float, back: float) -> float:
    """Share of the time that trains what is not lost again, with a checkpoint after `every` of training (Daly, equation
    20)."""
    if (every + saving + back) / between > LONGEST:
        return 0.0
    return every / (between * math.exp(back / between) * math.expm1((every + saving) / between))


def back_for(share: float, every: float, saving: float, between: float) -> float:
    """The `back` with which `goodput` is this share; negative if it is not reached even with none."""
    return between * math.log(goodput(every, saving, between, 0.0) / share)
