"""fp8: scales, blocks that share one, and sums that stop growing.

E4M3 has 3 bits of fraction, its largest number is 448 and its smallest normal one 2^-6. Time: three quarters of an
hour. Data: made by the grader. Needs NumPy only.
"""

import numpy as np

LARGEST, FRACTION, LEAST = 448.0, 3, -6


def e4m3(x: np.ndarray) -> np.ndarray:
    """Each number rounded to the nearest one of E4M3, halves to the even fraction. Below 2^-6 numbers are 2^-9 apart.
    Beyond the largest number: the largest."""
    raise NotImplementedError


def scale(x: np.ndarray) -> float:
    """The largest power of two with which all of x stays within E4M3. 1 if x is zero."""
    raise NotImplementedError


def quantised(x: np.ndarray, block: int) -> np.ndarray:
    """x (n), in blocks of `block` neighbours that share a scale: multiplied by it, rounded to E4M3, and divided again.
    block divides n."""
    raise NotImplementedError


def bits(block: int) -> float:
    """Bits per number, with a scale of 8 bits for each block."""
    raise NotImplementedError


def stuck(terms: int) -> float:
    """The sum of so many ones, if it is rounded to E4M3 after each addition."""
    raise NotImplementedError
