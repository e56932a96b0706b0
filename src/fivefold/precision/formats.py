"""Formats of floating-point numbers, and what follows from their bits: range, epsilon. No torch.

A number is (-1)^sign * 2^(exponent - bias) * 1.fraction. With an exponent of zeros it is subnormal:
(-1)^sign * 2^(1 - bias) * 0.fraction. Formats below 8 bits come in blocks with a scale of their own.

Below them the numbers of a step, counted by their exponent, and what each format would make of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Specials = Literal["ieee", "nan", "none"]
"""What the largest exponent means. "ieee": infinities and NaN. "nan": numbers, but for NaN with a fraction of ones
(arXiv 2209.05433). "none": numbers only."""


@dataclass(frozen=True)
class Format:
    """A format of numbers.

    exponent, fraction: bits. torch: torch's dtype of the same numbers, "" if there is none. signed: it has a sign bit.
    bias: of the exponent. multiplied: the name under which data sheets state how fast it is multiplied
    (`host.devices`).
    """

    name: str
    exponent: int
    fraction: int
    specials: Specials = "ieee"
    torch: str = ""
    signed: bool = True
    bias: int = field(default=-1)
    multiplied: str = ""

    def __post_init__(self) -> None:
        if self.bias < 0:
            object.__setattr__(self, "bias", 2 ** (self.exponent - 1) - 1)

    @property
    def bits(self) -> int:
        return self.signed + self.exponent + self.fraction

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next larger number."""
        return 2.0**-self.fraction

    @property
    def highest(self) -> int:
        """The largest exponent of a number."""
        codes = 2**self.exponent - 1
        taken = self.specials == "ieee" or (self.specials == "nan" and self.fraction == 0)
        return codes - taken - self.bias

    @property
    def lowest(self) -> int:
        """The smallest exponent of a normal number. Without fraction bits there are no subnormal ones."""
        return (self.fraction > 0) - self.bias

    @property
    def largest(self) -> float:
        last = 2**self.fraction - 1 - (self.specials == "nan" and self.fraction > 0)
        return 2.0**self.highest * (1 + last * self.epsilon)

    @property
    def smallest_normal(self) -> float:
        return 2.0**self.lowest

    @property
    def smallest(self) -> float:
        """The smallest number above 0: a subnormal one."""
        return self.smallest_normal * self.epsilon


FORMATS = {
    one.name: one
    for one in (
        Format("fp64", 11, 52, torch="float64", multiplied="fp64"),
        Format("fp32", 8, 23, torch="float32", multiplied="fp32"),
        Format("tf32", 8, 10, multiplied="tf32"),
        Format("bf16", 8, 7, torch="bfloat16", multiplied="bf16"),
        Format("fp16", 5, 10, torch="float16", multiplied="fp16"),
        Format("fp8 e4m3", 4, 3, "nan", torch="float8_e4m3fn", multiplied="fp8"),
        Format("fp8 e5m2", 5, 2, torch="float8_e5m2", multiplied="fp8"),
        Format("fp6 e3m2", 3, 2, "none", multiplied="fp6"),
        Format("fp6 e2m3", 2, 3, "none", multiplied="fp6"),
        Format("fp4 e2m1", 2, 1, "none", multiplied="fp4"),
    )
}
"""By name, from the widest to the narrowest."""
E8M0 = Format("e8m0", 8, 0, "nan", torch="float8_e8m0fnu", signed=False)
"""The scale of a block of an MX format: a power of two."""


@dataclass(frozen=True)
class Block:
    """Numbers that share a scale. size: numbers per block. tensor: the tensor has a scale in fp32, too."""

    name: str
    element: Format
    size: int
    scale: Format
    tensor: bool = False

    @property
    def bits(self) -> float:
        """Bits per number, with its share of the scale."""
        return self.element.bits + self.scale.bits / self.size


BLOCKS = (
    *(Block(f"mx{name}", one, 32, E8M0) for name, one in FORMATS.items() if one.bits <= 8),
    Block("nvfp4", FORMATS["fp4 e2m1"], 16, FORMATS["fp8 e4m3"], tensor=True),
)
"""Formats with a scale per block: those of the OCP Microscaling specification 1.0 (arXiv 2310.10537), and NVFP4."""


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
