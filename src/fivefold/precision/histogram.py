"""Numbers of a step, counted by their exponent, and what each format would make of them. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fivefold.precision.formats import FORMATS, Format

KINDS = ("weights", "activations", "activation gradients", "weight gradients")
LOWEST, HIGHEST = FORMATS["fp32"].lowest - FORMATS["fp32"].fraction, FORMATS["fp32"].highest
"""Exponents of fp32, with those of its subnormal numbers."""
BINS = HIGHEST - LOWEST + 3
"""Zeros, the exponents from `LOWEST` to `HIGHEST`, what is not finite."""


@dataclass(frozen=True)
class Fate:
    """Shares of the numbers that are not zero: those that a format rounds to zero, makes subnormal (with fewer bits),
    cannot hold because they are too large."""

    zero: float
    subnormal: float
    large: float


@dataclass(frozen=True)
class Histogram:
    """counts: by kind, of each of the `BINS`."""

    counts: dict[str, Sequence[int]]

    def exponents(self, kind: str) -> dict[int, int]:
        """Numbers by exponent, the whole part of log2 |x|, where there are any."""
        found = self.counts[kind][1:-1]
        return {LOWEST + place: number for place, number in enumerate(found) if number}

    def fate(self, kind: str, form: Format, shift: int = 0) -> Fate:
        """What the format makes of the numbers, multiplied by 2^shift. One is rounded to zero if it is below half of
        the smallest."""
        found, smallest = self.exponents(kind), form.lowest - form.fraction
        total = sum(found.values()) or 1
        zero = sum(n for e, n in found.items() if e + shift < smallest - 1)
        subnormal = sum(n for e, n in found.items() if smallest - 1 <= e + shift < form.lowest)
        return Fate(
            zero / total,
            subnormal / total,
            sum(n for e, n in found.items() if e + shift > form.highest) / total,
        )

    def headroom(self, kind: str, form: Format) -> int:
        """The largest power of two (its exponent) by which the numbers can be multiplied without one too large."""
        return form.highest - 1 - max(self.exponents(kind), default=form.highest - 1)

    def as_json(self) -> dict[str, object]:
        return {
            kind: {
                "zero": found[0],
                "not_finite": found[-1],
                "exponents": {str(e): n for e, n in self.exponents(kind).items()},
            }
            for kind, found in self.counts.items()
        }


def from_json(found: dict[str, dict[str, object]]) -> Histogram:
    counts: dict[str, Sequence[int]] = {}
    for kind, one in found.items():
        bins = [0] * BINS
        bins[0], bins[-1] = int(str(one["zero"])), int(str(one["not_finite"]))
        exponents = one["exponents"]
        assert isinstance(exponents, dict)
        for exponent, number in exponents.items():
            bins[int(exponent) - LOWEST + 1] = number
        counts[kind] = bins
    return Histogram(counts)
