"""fp8: scales, blocks that share one, and sums that stop growing.

E4M3 has 3 bits of fraction, its largest number is 448 and its smallest normal one 2^-6. Time: three quarters of an
hour. Data: made by the grader. Needs NumPy only.
"""

import numpy as np

LARGEST, FRACTION, LEAST = 448.0, 3, -6


def e4m3(x: np.ndarray) -> np.ndarray:
    """Each number rounded to the nearest one of E4M3, halves to the even fraction. Below 2^-6 numbers are 2^-9 apart.
    Beyond the largest number: the largest."""
    _, exponent = np.frexp(x)
    step = np.exp2(np.maximum(exponent - 1, LEAST) - FRACTION)
    return np.clip(np.round(x / step) * step, -LARGEST, LARGEST)


def scale(x: np.ndarray) -> float:
    """The largest power of two with which all of x stays within E4M3. 1 if x is zero."""
    largest = float(np.abs(x).max())
    return 1.0 if largest == 0 else float(2.0 ** np.floor(np.log2(LARGEST / largest)))


def quantised(x: np.ndarray, block: int) -> np.ndarray:
    """x (n), in blocks of `block` neighbours that share a scale: multiplied by it, rounded to E4M3, and divided again.
    block divides n."""
    found = np.empty_like(x)
    for start in range(0, len(x), block):
        part = x[start : start + block]
        s = scale(part)
        found[start : start + block] = e4m3(part * s) / s
    return found


def bits(block: int) -> float:
    """Bits per number, with a scale of 8 bits for each block."""
    return 8 + 8 / block


def stuck(terms: int) -> float:
    """The sum of so many ones, if it is rounded to E4M3 after each addition."""
    total = np.zeros(1)
    for _ in range(terms):
        total = e4m3(total + 1)
    return float(total[0])
