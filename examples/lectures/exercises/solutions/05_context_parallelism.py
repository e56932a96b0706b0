"""Context parallelism: attention to keys that come in parts, and who computes how much of it.

Time: three quarters of an hour. Data: none. Needs NumPy only.
"""

import numpy as np


def partial(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Attention of queries (t, d) to some keys and values (s, d), without a mask: (output (t, d), log-sum-exp of each
    query's scores (t)). Scores are q k^T / sqrt(d). Subtract the largest score before exponentials."""
    scores = q @ k.T / np.sqrt(q.shape[1])
    largest = scores.max(1, keepdims=True)
    weights = np.exp(scores - largest)
    total = weights.sum(1, keepdims=True)
    return weights @ v / total, (largest + np.log(total))[:, 0]


def merge(
    out1: np.ndarray, lse1: np.ndarray, out2: np.ndarray, lse2: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Attention to both of two sets of keys, from the results for each: (output, log-sum-exp)."""
    lse = np.logaddexp(lse1, lse2)
    return out1 * np.exp(lse1 - lse)[:, None] + out2 * np.exp(lse2 - lse)[:, None], lse


def zigzag(tokens: int, ranks: int, rank: int) -> list[int]:
    """The positions of a rank's tokens. The sequence is cut into 2 n chunks; rank r has chunk r and chunk 2 n - 1 -
    r."""
    chunk = tokens // (2 * ranks)
    early, late = rank * chunk, (2 * ranks - 1 - rank) * chunk
    return [*range(early, early + chunk), *range(late, late + chunk)]


def pairs(positions: list[int]) -> int:
    """The pairs of query and key that a rank with these positions computes under a causal mask: a query at position i
    sees the keys at 0 to i."""
    return sum(position + 1 for position in positions)
