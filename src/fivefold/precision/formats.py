"""Formats of floating-point numbers, and what follows from their bits: range, epsilon. No torch.

A number is (-1)^sign * 2^(exponent - bias) * 1.fraction. With an exponent of zeros it is subnormal:
(-1)^sign * 2^(1 - bias) * 0.fraction. Formats below 8 bits come in blocks with a scale of their own.
"""

from __future__ import annotations

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
    def parts(self) -> dict[str, int]:
        """Bits of each part, in the order in which a number is stored."""
        return {"sign": int(self.signed), "exponent": self.exponent, "fraction": self.fraction}

    @property
    def bits(self) -> int:
        return sum(self.parts.values())

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

    def value(self, code: int) -> float:
        """The number that these bits stand for. They stand neither for an infinity nor for NaN."""
        fraction, rest = code & (2**self.fraction - 1), code >> self.fraction
        exponent, sign = rest & (2**self.exponent - 1), -1 if self.signed and rest >> self.exponent else 1
        if self.fraction and not exponent:
            return sign * self.smallest * fraction
        return sign * 2.0 ** (exponent - self.bias) * (1 + fraction * self.epsilon)

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
