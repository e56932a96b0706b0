"""Few bits per element, with a scale per block: int8 and int4 (largest element), and 1 bit (mean magnitude: 1-bit SGD,
Seide et al., Interspeech 2014; 1-bit Adam, arXiv 2102.02888). The levels of int8 and int4 are equally far apart.
Gradients are not spread evenly, so `nf4` and `dynamic8` have levels that are closer where more numbers are.

Each rank owns a chunk of the bucket. It gets the others' encoded gradients of its chunk (all-to-all), sums them in
fp32, and sends the encoded sum to everyone (all-gather). Its own gradient of its chunk is never encoded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from fivefold.schedules.compression.compressor import Compressor, Shape, Wire, sizes

LARGEST = {8: 127, 4: 7}
"""What the largest element of a block becomes, by bits."""


@lru_cache(maxsize=2)
def dynamic(signed: bool) -> tuple[float, ...]:
    """The 256 values of the dynamic map (arXiv 2110.02861), ascending, from -1 or 0 to 1: a power of ten times a linear
    fraction. The larger the power, the more fractions."""
    values, bits = [0.0, 1.0], 6 if signed else 7
    for power in range(bits + 1):  # 1, 2, 4, ... 2^bits fractions, in the middle of equal parts of [0.1, 1]
        parts = 2**power
        middles = (0.1 + 0.9 * (i + 0.5) / parts for i in range(parts))
        values += [10.0 ** (power - bits) * middle for middle in middles]
    if signed:
        return tuple(sorted(values + [-value for value in values[2:]]))
    values.sort()
    return (0.0, *values[2:])  # one too many: the smallest


def normal() -> tuple[float, ...]:
    """The 16 values of NormalFloat (QLoRA, arXiv 2305.14314, appendix E), ascending, from -1 to 1: quantiles of normal
    numbers, 0 among them, so that each value stands for about as many numbers. The last quantile is the mean of the
    last ones of 15 and of 16 equal parts."""
    last = 1 - (1 / 30 + 1 / 32) / 2
    halves = ([NormalDist().inv_cdf(last - (last - 0.5) * i / n) for i in range(n)] for n in (7, 8))
    below, above = ([value / half[0] for value in half] for half in halves)
    return tuple(sorted([*(-value for value in below), 0.0, *above]))


@dataclass(frozen=True)
class Blocks(Compressor):
    """bits: per element. block: elements that share a scale (fp32). Each parameter begins a new block. levels: what
    the codes stand for, as shares of a block's largest element, ascending; none: they are equally far apart."""

    bits: int
    block: int
    levels: tuple[float, ...] = ()

    def starts(self, shapes: Sequence[Shape]) -> list[int]:
        """The element at which each parameter begins, and the end, if each fills whole blocks."""
        found = [0]
        for size in sizes(shapes):
            found.append(found[-1] + math.ceil(size / self.block) * self.block)
        return found

    def chunk(self, shapes: Sequence[Shape], ranks: int) -> int:
        """Blocks of a rank's chunk; the last chunks may end in empty blocks."""
        return math.ceil(self.starts(shapes)[-1] / self.block / ranks)

    def row(self, blocks: int) -> int:
        """Bytes of so many encoded blocks: the elements, then the scales."""
        return blocks * (self.block * self.bits // 8 + 4)

    @property
    def per_element(self) -> float:
        """Bytes of an element of whole blocks."""
        return self.row(1) / self.block

    def messages(self, shapes: Sequence[Shape], ranks: int) -> tuple[Wire, ...]:
        size = ranks * self.row(self.chunk(shapes, ranks))
        return Wire("all_to_all", size), Wire("all_gather", size)

    def kept(self, shapes: Sequence[Shape], ranks: int) -> int:
        return 4 * ranks * self.chunk(shapes, ranks) * self.block

    def scratch(self, shapes: Sequence[Shape], ranks: int) -> int:
        """A chunk in fp32; its bits as bytes, twice, or its codes as bytes and in int32 with their levels."""
        return (13 if self.levels else 4 if self.bits == 8 else 6) * self.chunk(shapes, ranks) * self.block


INT8 = Blocks("int8", 22.0, bits=8, block=256, whole=0.0)
INT4 = Blocks("int4", 38.0, bits=4, block=256, whole=0.0)
COMPRESSORS: dict[str, Callable[[str], Compressor]] = {
    "int8": lambda text: INT8,
    "int4": lambda text: INT4,
    "nf4": lambda text: Blocks(text, 38.0, bits=4, block=256, levels=normal(), whole=0.0),
    "dynamic8": lambda text: Blocks(text, 38.0, bits=8, block=256, levels=dynamic(True), whole=0.0),
    "1bit": lambda text: Blocks(text, 38.0, bits=1, block=64),
}
