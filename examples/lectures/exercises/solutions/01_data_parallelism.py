"""Data parallelism: who computes which rows, what the ranks' gradients add up to, and in which order they travel.

Time: half an hour. Data: none. Needs NumPy only.
"""

import numpy as np


def rows(rank: int, ranks: int, batch: int) -> range:
    """The rows of a batch that a rank computes, in order of the ranks. If they do not divide evenly, the first ranks
    have one more each: 10 rows on 4 ranks are 3, 3, 2, 2."""
    each, more = divmod(batch, ranks)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def batch_gradient(means: list[np.ndarray], counts: list[int]) -> np.ndarray:
    """The gradient of the mean loss over the whole batch. means: of each rank, the gradient of the mean over its own
    rows, of which there are `counts`."""
    total = sum(counts)
    return sum((mean * (count / total) for mean, count in zip(means, counts, strict=True)), np.zeros(()))


def ring_bytes(ranks: int, size: float) -> float:
    """Bytes that a rank sends in a ring all-reduce of `size` bytes."""
    return 2 * (ranks - 1) / ranks * size


def buckets(sizes: list[int], limit: int) -> list[list[int]]:
    """The numbers of the parameters in each bucket, in the order in which buckets leave. Backward has the gradient of
    the last parameter first. A bucket is full as soon as its bytes (`sizes`, by parameter) reach the limit; the last
    one may stay smaller."""
    found, filled = [], limit
    for number in reversed(range(len(sizes))):
        if filled >= limit:
            found.append([])
            filled = 0
        found[-1].append(number)
        filled += sizes[number]
    return found
