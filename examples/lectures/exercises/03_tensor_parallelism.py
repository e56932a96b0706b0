"""Tensor parallelism: a feed-forward layer Z = relu(X A) B whose matrices are cut over ranks.

Time: forty minutes. Data: none. Needs NumPy only.
"""

import numpy as np


def cut(a: np.ndarray, b: np.ndarray, ranks: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each rank's columns of a (D, F) and rows of b (F, D)."""
    raise NotImplementedError


def forward(x: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What a rank computes of Z before the all-reduce. x (T, D) whole, a (D, F / ranks), b (F / ranks, D)."""
    raise NotImplementedError


def backward(
    x: np.ndarray, a: np.ndarray, b: np.ndarray, dz: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dx, da, db) on a rank, given dz (T, D), the whole gradient of Z. dx: before the all-reduce; da and db: those of
    the rank's own columns and rows."""
    raise NotImplementedError


def messages(blocks: int, ranks: int, tokens: int, width: int) -> float:
    """Elements that a rank sends in a step of a model: forward and backward each have two all-reduces per block, of
    `tokens` x `width` elements, in a ring."""
    raise NotImplementedError
