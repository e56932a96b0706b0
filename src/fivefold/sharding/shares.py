"""How a batch is shared between data-parallel ranks and a flat gradient buffer cut into buckets; divisors. No torch.

Ranks take whole microbatches, as equally many as can be. Every layout computes the microbatches of one process, so a
mean over them is the same mean for any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def share(microbatches: int, index: int, ranks: int) -> range:
    """The microbatches of data-parallel rank `index`: neighbours, and at most one more than any other rank has."""
    return range(microbatches * index // ranks, microbatches * (index + 1) // ranks)


def largest(microbatches: int, ranks: int) -> int:
    """Microbatches of the rank that has most. A step takes as long as this rank."""
    return -(-microbatches // ranks)


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`."""
    return max(divisor for divisor in divisors(number) if divisor <= most)


BUCKET_BYTES = 25 << 20
"""Minimum bytes of fp32 gradients per bucket, unless `layout.bucket_mib` says otherwise."""


def buckets(sizes: Sequence[int], bucket_bytes: float = BUCKET_BYTES) -> list[range]:
    """Cuts a buffer into buckets of whole, consecutive parameters. All but the last have at least `bucket_bytes` of
    fp32 gradients.

    sizes: elements of each parameter in the order of the flat buffer. Returns their indices.
    """
    found, filled = [range(0)], 0
    for index, size in enumerate(sizes):
        if 4 * filled >= bucket_bytes:
            found.append(range(index, index))
            filled = 0
        found[-1] = range(found[-1].start, index + 1)
        filled += size
    return found
