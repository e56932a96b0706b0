"""Precision: bits of a floating-point number, rounding to few of them, and the factor on the loss.

A format has `e` bits of exponent and `f` of fraction; the bias of the exponent is 2^(e - 1) - 1. Time: an hour. Data:
none. Plain Python.
"""


def value(code: int, e: int, f: int) -> float:
    """The number with these bits: 1 of the sign, then e, then f. An exponent of zeros is a subnormal number,
    0.fraction x 2^(1 - bias). One of all ones is infinity (fraction 0) or no number (nan)."""
    raise NotImplementedError


def largest(e: int, f: int) -> float:
    """The largest finite number of the format."""
    raise NotImplementedError


def rounded(x: float, e: int, f: int) -> float:
    """The nearest number of the format; of two that are as near, the one with an even fraction. Beyond the largest one
    by half a step or more: infinity."""
    raise NotImplementedError


def loss_scale(overflows: list[bool], first: float, every: int) -> list[float]:
    """The factor on the loss in each step, given whether the step overflowed. An overflow halves the next one. Behind
    `every` steps in a row without one it doubles."""
    raise NotImplementedError
