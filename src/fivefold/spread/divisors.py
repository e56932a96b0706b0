"""Divisors of a number."""

from __future__ import annotations

import math


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`."""
    return max(divisor for divisor in divisors(number) if divisor <= most)
