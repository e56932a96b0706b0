"""The buckets of a flat gradient buffer. No torch."""

from __future__ import annotations

from collections.abc import Sequence

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
