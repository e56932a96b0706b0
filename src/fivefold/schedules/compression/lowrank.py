"""PowerSGD (arXiv 1905.13727): a matrix M (m, n) is sent as P (m, r) and Q (n, r), with r far smaller than m and n.

P = M Q is summed and made orthonormal, then Q = M^T P is summed; the result is P Q^T. Q is the start of the next step
(one step of a power iteration per training step). Vectors, and matrices that this would not make smaller, are summed
as they are, together with P.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fivefold.schedules.compression.compressor import Compressor, Shape, Wire


@dataclass(frozen=True)
class LowRank(Compressor):
    """rank: r."""

    rank: int

    def matrix(self, shape: Shape) -> tuple[int, int] | None:
        """(m, n) of a parameter; of more than two dims, all but the last are rows. None: it is summed as it is."""
        if len(shape) < 2:
            return None
        m, n = math.prod(shape[:-1]), shape[-1]
        return (m, n) if self.rank * (m + n) < m * n else None

    def messages(self, shapes: Sequence[Shape], ranks: int) -> tuple[Wire, ...]:
        matrices = [self.matrix(shape) for shape in shapes]
        plain = sum(math.prod(shape) for shape, two in zip(shapes, matrices, strict=True) if two is None)
        first = Wire("all_reduce", 4 * (plain + self.rank * sum(two[0] for two in matrices if two)))
        second = Wire("all_reduce", 4 * self.rank * sum(two[1] for two in matrices if two))
        return (first, second) if second.size else (first,)

    def kept(self, shapes: Sequence[Shape], ranks: int) -> int:
        matrices = [two for two in map(self.matrix, shapes) if two]
        return 4 * sum(m * n + self.rank * n for m, n in matrices)

    def scratch(self, shapes: Sequence[Shape], ranks: int) -> int:
        """P and Q of all matrices."""
        return 4 * self.rank * sum(m + n for m, n in filter(None, map(self.matrix, shapes)))


def rank(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError("must be a rank, a whole number >= 1")
    return int(text)


COMPRESSORS: dict[str, Callable[[str], Compressor]] = {
    "powersgd:4": lambda text: LowRank(text, 9.0, rank(text.partition(":")[2])),
}
