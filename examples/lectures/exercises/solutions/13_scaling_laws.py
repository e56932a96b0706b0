"""Size: parameters, FLOPs, days, and a law that is fitted to small runs.

Time: three quarters of an hour. Data: made by the grader. Needs NumPy only.
"""

import numpy as np


def parameters(vocabulary: int, width: int, blocks: int) -> int:
    """Parameters of a GPT: an embedding, and per block the attention (4 d^2), a feed-forward layer of inner width 4 d
    (8 d^2) and its biases (5 d)."""
    return vocabulary * width + blocks * (12 * width * width + 5 * width)


def days(size: float, tokens: float, devices: int, rate: float) -> float:
    """Days of training with 6 FLOPs per token and parameter on devices that reach `rate` FLOP/s each."""
    return 6 * size * tokens / (devices * rate) / 86400


def best_size(flops: float) -> tuple[float, float]:
    """(parameters, tokens) that use a budget of FLOPs with 20 tokens per parameter."""
    size = (flops / 120) ** 0.5
    return size, 20 * size


def power_law(sizes: np.ndarray, losses: np.ndarray) -> tuple[float, float]:
    """(A, alpha) of the law A / N^alpha, a straight line in logarithms: the least squares of log(loss)."""
    slope, height = np.polyfit(np.log(sizes), np.log(losses), 1)
    return float(np.exp(height)), float(-slope)


def with_floor(sizes: np.ndarray, losses: np.ndarray, floors: np.ndarray) -> float:
    """The floor E among `floors` (all below every loss) for which log(loss - E) is closest to a straight line in
    log(N), by the sum of squared distances."""
    x = np.log(sizes)

    def distance(floor: float) -> float:
        y = np.log(losses - floor)
        return float(((y - np.polyval(np.polyfit(x, y, 1), x)) ** 2).sum())

    return float(min(floors, key=distance))
