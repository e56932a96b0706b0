"""Optimizers: Adam, its decoupled decay, Muon's orthogonal direction, and what they remember.

Time: three quarters of an hour. Data: none. Needs NumPy only.
"""

import numpy as np


def adam(
    w: np.ndarray, gradients: list[np.ndarray], lr: float, b1: float, b2: float, eps: float, decay: float
) -> np.ndarray:
    """The weights behind one update by each gradient. Moments begin at zero, and their bias is corrected. eps is added
    to the root. The decay is decoupled (AdamW): each update also subtracts lr x decay x w, of the weight before it."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for step, g in enumerate(gradients, start=1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        direction = (m / (1 - b1**step)) / (np.sqrt(v / (1 - b2**step)) + eps)
        w = w - lr * decay * w - lr * direction
    return w


def orthogonal(g: np.ndarray, steps: int = 5) -> np.ndarray:
    """Muon's direction of a matrix with at most as many rows as columns. It begins with x = g over its norm (the root
    of the sum of all squares). Each step is x <- a x + (b s + c s s) x with s = x x^T and (a, b, c) = (3.4445, -4.775,
    2.0315)."""
    a, b, c = 3.4445, -4.775, 2.0315
    x = g / np.sqrt((g * g).sum())
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x


def state_bytes(rows: int, columns: int, name: str) -> int:
    """Bytes of fp32 states for a matrix. "sgd" has none, "momentum" and "muon" a moment for each element, "adam" two,
    "adafactor" (without momentum) one number for each row and each column."""
    each = {"sgd": 0, "momentum": 1, "muon": 1, "adam": 2}
    return 4 * (rows + columns if name == "adafactor" else each[name] * rows * columns)


def stable_rate(curvatures: list[float]) -> float:
    """The learning rate below which gradient descent converges on f(w) = sum of h_i w_i^2 / 2, with these h_i > 0: it
    multiplies w_i by 1 - lr h_i in each step."""
    return 2 / max(curvatures)
