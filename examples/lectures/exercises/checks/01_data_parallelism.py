"""Checks of 01_data_parallelism.py."""

import numpy as np


def check_rows(rows):
    rows.gives(range(0, 3), 0, 4, 10)
    for batch, ranks in ((12, 4), (10, 4), (3, 5), (7, 1)):
        parts = [list(rows(rank, ranks, batch)) for rank in range(ranks)]
        if [row for part in parts for row in part] != list(range(batch)):
            rows.wrong(f"{batch} rows on {ranks} ranks: {parts} are not all rows, once each and in order")
        counts = [len(part) for part in parts]
        if max(counts) - min(counts) > 1 or counts != sorted(counts, reverse=True):
            rows.wrong(
                f"{batch} rows on {ranks} ranks: {parts} are not even, the first ranks having one more"
            )


def check_batch_gradient(batch_gradient):
    draw = np.random.default_rng(0)
    each = draw.normal(size=(10, 3))  # the gradient of each row's loss
    for counts in ([5, 5], [3, 3, 2, 2], [9, 1]):
        ends = np.cumsum(counts)
        means = [each[end - count : end].mean(0) for count, end in zip(counts, ends, strict=True)]
        why = "a rank with more rows counts for more" if len(set(counts)) > 1 else "the mean over all rows"
        batch_gradient.gives(each.mean(0), means, counts, why=why)


def check_ring_bytes(ring_bytes):
    for ranks in (1, 2, 4, 8):
        # n - 1 rounds of a reduce-scatter, and n - 1 of an all-gather, each of an n-th
        wanted = sum(24.0 / ranks for _ in range(2 * (ranks - 1)))
        ring_bytes.gives(float(wanted), ranks, 24.0, why="each round sends an n-th of the bytes")


def check_buckets(buckets):
    buckets.gives([[3, 2], [1, 0]], [4, 4, 4, 4], 8)
    buckets.gives([[2], [1, 0]], [1, 1, 30], 10, why="a large gradient fills its bucket alone")
    buckets.gives([[2, 1, 0]], [1, 1, 1], 100, why="all fit into one")
    buckets.gives([[4, 3, 2], [1, 0]], [5, 5, 3, 3, 3], 9, why="9 bytes are a full bucket")
