"""Sequence parallelism: the two messages that replace an all-reduce, and what a rank keeps.

Ranks are the entries of a list here: `parts[r]` is what rank r has. Time: half an hour. Data: none. Needs NumPy only.
"""

import numpy as np


def all_gather(parts: list[np.ndarray]) -> list[np.ndarray]:
    """What each rank has behind an all-gather of the ranks' tokens: (t, D) each -> (T, D) each."""
    return [np.concatenate(parts) for _ in parts]


def reduce_scatter(parts: list[np.ndarray]) -> list[np.ndarray]:
    """What each rank has behind a reduce-scatter: the sum of all (T, D), of which rank r gets the r-th part of the
    tokens, (t, D)."""
    return list(np.split(np.sum(parts, axis=0), len(parts)))


def layer(x: list[np.ndarray], a: list[np.ndarray], b: list[np.ndarray]) -> list[np.ndarray]:
    """relu(X A) B by ranks with their tokens x (t, D), columns a (D, F / n) and rows b (F / n, D) -> their tokens of
    the result."""
    whole = all_gather(x)
    return reduce_scatter([np.maximum(x @ a, 0) @ b for x, a, b in zip(whole, a, b, strict=True)])


def block_bytes(s: int, b: int, h: int, a: int, t: int, sp: bool) -> float:
    """Bytes of activations that a block keeps on a rank of `t`, with s tokens, b sequences, width h and a heads, all
    numbers in 16 bits (arXiv 2205.05198). Of 34 sbh, 10 belong to norms, dropout and the residual stream, which
    only sequence parallelism cuts. Attention's scores take 5 a b s^2."""
    outside = 10 * s * b * h / (t if sp else 1)
    return outside + (24 * s * b * h + 5 * a * b * s * s) / t
