"""Precision: bits of a floating-point number, rounding to few of them, and the factor on the loss.

A format has `e` bits of exponent and `f` of fraction; the bias of the exponent is 2^(e - 1) - 1. Time: an hour. Data:
none. Plain Python.
"""

import math


def value(code: int, e: int, f: int) -> float:
    """The number with these bits: 1 of the sign, then e, then f. An exponent of zeros is a subnormal number,
    0.fraction x 2^(1 - bias). One of all ones is infinity (fraction 0) or no number (nan)."""
    sign = -1.0 if code >> (e + f) else 1.0
    exponent, fraction = (code >> f) & (2**e - 1), code & (2**f - 1)
    bias = 2 ** (e - 1) - 1
    if exponent == 2**e - 1:
        return math.nan if fraction else sign * math.inf
    if exponent == 0:
        return sign * fraction / 2**f * 2.0 ** (1 - bias)
    return sign * (1 + fraction / 2**f) * 2.0 ** (exponent - bias)


def largest(e: int, f: int) -> float:
    """The largest finite number of the format."""
    return (2 - 2.0**-f) * 2.0 ** (2 ** (e - 1) - 1)


def rounded(x: float, e: int, f: int) -> float:
    """The nearest number of the format; of two that are as near, the one with an even fraction. Beyond the largest one
    by half a step or more: infinity."""
    if x == 0 or not math.isfinite(x):
        return x
    least = 2 - 2 ** (e - 1)  # the exponent of the smallest normal number
    step = 2.0 ** (max(math.frexp(abs(x))[1] - 1, least) - f)
    found = round(x / step) * step  # Python rounds halves to even
    return found if abs(found) <= largest(e, f) else math.copysign(math.inf, x)


def loss_scale(overflows: list[bool], first: float, every: int) -> list[float]:
    """The factor on the loss in each step, given whether the step overflowed. An overflow halves the next one. Behind
    `every` steps in a row without one it doubles."""
    found, factor, good = [], first, 0
    for overflow in overflows:
        found.append(factor)
        good = 0 if overflow else good + 1
        if overflow:
            factor /= 2
        elif good == every:
            factor, good = factor * 2, 0
    return found
