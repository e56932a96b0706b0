"""Expert parallelism: who computes which token, and how even the load is.

Time: three quarters of an hour. Data: none. Needs NumPy only.
"""

import numpy as np


def route(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k best experts of each token, the best first, and their weights, which sum to 1: (N, k) each. logits (N, E);
    shares are their softmax."""
    raise NotImplementedError


def rows_for_ranks(chosen: np.ndarray, experts: int, ranks: int) -> list[int]:
    """How many rows go to each rank, if rank r has the r-th part of the experts. chosen (N, k)."""
    raise NotImplementedError


def imbalance(chosen: np.ndarray, experts: int, ranks: int) -> float:
    """Rows of the busiest rank over an even share: everybody waits for it, so a step's experts take so much longer."""
    raise NotImplementedError


def balance_loss(shares: np.ndarray, chosen: np.ndarray) -> float:
    """E times the sum over experts of (share of all choices that are this expert) x (its mean share in `shares`, (N,
    E)). 1 at an even load (arXiv 2101.03961, equation 4)."""
    raise NotImplementedError


def balanced(scores: np.ndarray, k: int, rate: float, steps: int) -> np.ndarray:
    """A bias for each expert, (E), which evens the load without a loss (arXiv 2408.15664). It begins at 0. In each step
    every token chooses the k experts with the largest score + bias; then the bias of each expert that got more than an
    even share falls by `rate`, and that of one that got less rises by it. scores (N, E), the same in each step."""
    raise NotImplementedError
