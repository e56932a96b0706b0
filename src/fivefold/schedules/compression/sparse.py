"""A share of each parameter's elements: the largest (top-k), or random ones (random-k); see arXiv 1901.09847.

Top-k: each rank has its own elements, so values and indices travel (all-gather). Random-k: all ranks draw the same
elements from the number of the step, so only values travel, and they can be summed on the way (all-reduce).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fivefold.schedules.compression.compressor import Compressor, Shape, Wire, sizes

INDEX, VALUE = 4, 4  # bytes: int32, fp32


@dataclass(frozen=True)
class Sparse(Compressor):
    """share: of each parameter's elements, at least one of them."""

    share: float

    def counts(self, shapes: Sequence[Shape]) -> list[int]:
        """Elements that are sent of each parameter."""
        return [math.ceil(self.share * size) for size in sizes(shapes)]

    def kept(self, shapes: Sequence[Shape], ranks: int) -> int:
        return 4 * sum(sizes(shapes))


@dataclass(frozen=True)
class TopK(Sparse):
    @property
    def passes(self) -> float:
        return 12.0

    def messages(self, shapes: Sequence[Shape], ranks: int) -> tuple[Wire, ...]:
        return (Wire("all_gather", ranks * (VALUE + INDEX) * sum(self.counts(shapes))),)

    def scratch(self, shapes: Sequence[Shape], ranks: int) -> int:
        """Absolute values of a parameter, and indices (int64)."""
        return 4 * max(sizes(shapes)) + 8 * sum(self.counts(shapes))


@dataclass(frozen=True)
class RandomK(Sparse):
    @property
    def passes(self) -> float:
        return 7.0

    def messages(self, shapes: Sequence[Shape], ranks: int) -> tuple[Wire, ...]:
        return (Wire("all_reduce", VALUE * sum(self.counts(shapes))),)

    def scratch(self, shapes: Sequence[Shape], ranks: int) -> int:
        """Random numbers (fp64) and indices (int64)."""
        return (8 + 8) * sum(self.counts(shapes))


def share(text: str) -> float:
    found = float(text)
    if not 0 < found <= 1:
        raise ValueError("must be a share of the elements, above 0 and at most 1")
    return found


COMPRESSORS: dict[str, Callable[[str], Compressor]] = {
    "topk:0.01": lambda text: TopK(text, share(text.partition(":")[2])),
    "randk:0.01": lambda text: RandomK(text, share(text.partition(":")[2])),
}
