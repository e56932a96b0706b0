"""Size: parameters, FLOPs, days, and a law that is fitted to small runs.

Time: three quarters of an hour. Data: made by the grader. Needs NumPy only.
"""

import numpy as np


def parameters(vocabulary: int, width: int, blocks: int) -> int:
    """Parameters of a GPT: an embedding, and per block the attention (4 d^2), a feed-forward layer of inner width 4 d
    (8 d^2) and its biases (5 d)."""
    raise NotImplementedError


def days(size: float, tokens: float, devices: int, rate: float) -> float:
    """Days of training with 6 FLOPs per token and parameter on devices that reach `rate` FLOP/s each."""
    raise NotImplementedError


def best_size(flops: float) -> tuple[float, float]:
    """(parameters, tokens) that use a budget of FLOPs with 20 tokens per parameter."""
    raise NotImplementedError


def power_law(sizes: np.ndarray, losses: np.ndarray) -> tuple[float, float]:
    """(A, alpha) of the law A / N^alpha, a straight line in logarithms: the least squares of log(loss)."""
    raise NotImplementedError


def with_floor(sizes: np.ndarray, losses: np.ndarray, floors: np.ndarray) -> float:
    """The floor E among `floors` (all below every loss) for which log(loss - E) is closest to a straight line in
    log(N), by the sum of squared distances."""
    raise NotImplementedError
