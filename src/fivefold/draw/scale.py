"""Vertical scales and round numbers for the ticks of a chart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

TINY = 1e-300
"""Differences below it are none: powers of ten beside them are not normal numbers."""


@dataclass(frozen=True)
class Scale:
    """A vertical scale: its lowest and highest value, and its ticks."""

    low: float
    high: float
    ticks: Sequence[float]
    log: bool = False

    def height(self, value: float) -> float:
        """Position of `value`: 0 at the bottom, 1 at the top."""
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return (value - low) / (high - low)


def linear_scale(low: float, high: float, zero: bool) -> Scale:
    """A linear scale between round numbers. It starts at 0 if `zero` is set and no value is negative."""
    if zero and low >= 0:
        low = 0.0
    if high - low <= max(1e-12 * max(abs(high), abs(low)), TINY):
        margin = abs(high) / 10 or 1.0
        low, high = (low, high + margin) if low == 0 else (low - margin, high + margin)
    marks = ticks(low, high, count=5)
    gap = marks[1] - marks[0] if len(marks) > 1 else high - low
    low, high = gap * math.floor(low / gap + 1e-9), gap * math.ceil(high / gap - 1e-9)
    return Scale(low, high, [m for m in ticks(low, high, count=5) if low - gap / 9 <= m <= high + gap / 9])


def log_scale(low: float, high: float) -> Scale:
    """A logarithmic scale with ticks at powers of ten, also at 2 and 5 if they are few, or at round numbers."""
    decades = math.log10(high / low)
    if decades < 1:
        marks = ticks(low, high, count=6)
    else:
        within = (1, 2, 5) if decades < 3 else (1,)
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        marks = [float(m * 10.0**p) for p in powers for m in within]
        marks = marks[:: math.ceil(len(marks) / 12)]
    margin = (high / low) ** 0.03
    low, high = low / margin, high * margin
    return Scale(low, high, [m for m in marks if low <= m <= high], log=True)


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) in [low, high]."""
    raw = (high - low) / count
    if not raw > TINY:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    gap = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.ceil(low / gap - 1e-9), math.floor(high / gap + 1e-9)
    return [round(i * gap, 12 - math.floor(math.log10(gap))) for i in range(first, last + 1)]


def tick_labels(values: Sequence[float], unit: str = "") -> list[str]:
    """Labels with enough decimals to tell the values apart, all in one form: 0.5, 1,500, 20k, 3e-4.

    The unit is added only if it is %.
    """
    suffix = "%" if unit == "%" else ""
    largest = max(map(abs, values), default=0.0)
    gap = min((b - a for a, b in pairwise(values) if b > a), default=largest)
    if largest >= 1e15 or 0 < largest < 0.01:
        return [_power(value) + suffix for value in values]
    factor, letter = next(
        ((f, c) for f, c in _THOUSANDS if largest >= f * (10 if c == "k" else 1)), (1.0, "")
    )
    decimals = max(0, -math.floor(math.log10(gap / factor) + 1e-9)) if gap else 2
    return [f"{value / factor:,.{min(decimals, 6)}f}{letter * bool(value)}{suffix}" for value in values]


_THOUSANDS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def _power(value: float) -> str:
    """3e-4 rather than 3e-04."""
    if not value:
        return "0"
    digits, power = f"{value:.3g}".split("e") if "e" in f"{value:.3g}" else f"{value:.2e}".split("e")
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return f"{digits}e{int(power)}"
