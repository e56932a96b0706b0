"""Few bits per element, with a scale per block: int8 and int4 (largest element), and 1 bit (mean magnitude: 1-bit SGD,
Seide et al., Interspeech 2014; 1-bit Adam, arXiv 2102.02888).

Each rank owns a chunk of the bucket. It gets the others' encoded gradients of its chunk (all-to-all), sums them in
fp32, and sends the encoded sum to everyone (all-gather). Its own gradient of its chunk is never encoded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fivefold.schedules.compression.compressor import Compressor, Shape, Wire, sizes

LARGEST = {8: 127, 4: 7}
"""What the largest element of a block becomes, by bits."""


@dataclass(frozen=True)
class Blocks(Compressor):
    """bits: per element. block: elements that share a scale (fp32). Each parameter begins a new block."""

    bits: int
    block: int

    @property
    def whole(self) -> float:
        return 0.0 if self.bits in LARGEST else super().whole

    @property
    def passes(self) -> float:
        return 22.0 if self.bits == 8 else 38.0

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
        """A chunk in fp32; its bits as bytes, twice."""
        return (4 if self.bits == 8 else 6) * self.chunk(shapes, ranks) * self.block


INT8, INT4 = Blocks("int8", bits=8, block=256), Blocks("int4", bits=4, block=256)
COMPRESSORS: dict[str, Callable[[str], Compressor]] = {
    "int8": lambda text: INT8,
    "int4": lambda text: INT4,
    "1bit": lambda text: Blocks(text, bits=1, block=64),
}
