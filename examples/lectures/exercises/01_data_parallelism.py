"""Data parallelism: who computes which rows, what the ranks' gradients add up to, and in which order they travel.

Time: half an hour. Data: none. Needs NumPy only.
"""

import numpy as np


def rows(rank: int, ranks: int, batch: int) -> range:
    """The rows of a batch that a rank computes, in order of the ranks. If they do not divide evenly, the first ranks
    have one more each: 10 rows on 4 ranks are 3, 3, 2, 2."""
    raise NotImplementedError


def batch_gradient(means: list[np.ndarray], counts: list[int]) -> np.ndarray:
    """The gradient of the mean loss over the whole batch. means: of each rank, the gradient of the mean over its own
    rows, of which there are `counts`."""
    raise NotImplementedError


def ring_bytes(ranks: int, size: float) -> float:
    """Bytes that a rank sends in a ring all-reduce of `size` bytes."""
    raise NotImplementedError


def buckets(sizes: list[int], limit: int) -> list[list[int]]:
    """The numbers of the parameters in each bucket, in the order in which buckets leave. Backward has the gradient of
    the last parameter first. A bucket is full as soon as its bytes (`sizes`, by parameter) reach the limit; the last
    one may stay smaller."""
    raise NotImplementedError
