"""A share of each parameter's elements: the largest (top-k), or random ones (random-k); see arXiv 1901.09847.

Top-k: each rank has its own elements, so values and indices travel (all-gather). They are the largest of each stretch
of 65,536 elements, so that an index has 16 bits. Random-k: all ranks draw the same elements from the number of the
step, so only values travel, and they can be summed on the way (all-reduce).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fivefold.schedules.compression.compressor import Compressor, Shape, Wire, sizes

STRETCH = 2**16


@dataclass(frozen=True)
class Sparse(Compressor):
    """share: of each stretch's elements, at least one of them."""

    share: float

    @abstractmethod
    def stretches(self, shapes: Sequence[Shape]) -> list[int]:
        """Elements of each stretch, one after the other. None reaches into another parameter."""

    def counts(self, shapes: Sequence[Shape]) -> list[int]:
        """Elements that are sent of each stretch."""
        return [math.ceil(self.share * size) for size in self.stretches(shapes)]

    def kept(self, shapes: Sequence[Shape], ranks: int) -> int:
        return 4 * sum(sizes(shapes))


@dataclass(frozen=True)
class TopK(Sparse):
    def stretches(self, shapes: Sequence[Shape]) -> list[int]:
        return [min(STRETCH, size - start) for size in sizes(shapes) for start in range(0, size, STRETCH)]

    def messages(self, shapes: Sequence[Shape], ranks: int) -> tuple[Wire, ...]:
        """A value (bf16) and an index (16 bits) per element."""
        return (Wire("all_gather", ranks * (2 + 2) * sum(self.counts(shapes))),)

    def scratch(self, shapes: Sequence[Shape], ranks: int) -> int:
        """Absolute values of a stretch; indices (int64) and values."""
        return 4 * min(STRETCH, max(sizes(shapes))) + (8 + 8) * sum(self.counts(shapes))


@dataclass(frozen=True)
class RandomK(Sparse):
    def stretches(self, shapes: Sequence[Shape]) -> list[int]:
        return sizes(shapes)

    def messages(self, shapes: Sequence[Shape], ranks: int) -> tuple[Wire, ...]:
        """A value (fp32) per element."""
        return (Wire("all_reduce", 4 * sum(self.counts(shapes))),)

    def scratch(self, shapes: Sequence[Shape], ranks: int) -> int:
        """Random numbers (fp64) and indices (int64)."""
        return (8 + 8) * sum(self.counts(shapes))


def share(text: str) -> float:
    found = float(text)
    if not 0 < found <= 1:
        raise ValueError("must be a share of the elements, above 0 and at most 1")
    return found


COMPRESSORS: dict[str, Callable[[str], Compressor]] = {
    "topk:0.01": lambda text: TopK(text, 12.0, share(text.partition(":")[2])),
    "randk:0.01": lambda text: RandomK(text, 7.0, share(text.partition(":")[2])),
}
