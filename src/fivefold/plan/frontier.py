"""Throughput against memory: of all layouts that a search considered, those that no other beats in both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from fivefold.plan.predict import Plan
    from fivefold.plan.search import Found

T = TypeVar("T")


def frontier(found: Found, most: int = 12) -> list[Plan]:
    """The fastest layout for each memory, from least memory to most, predicted in full: at most `most` of those that
    the search's estimates name, and its plans."""
    plans = [*map(found.price, _spread(found.unbeaten, most)), *found.plans]
    return unbeaten(plans, lambda plan: (plan.peak_bytes, plan.step.seconds))


def unbeaten(
    items: Iterable[T], key: Callable[[T], tuple[float, float]], valid: Callable[[T], bool] = lambda _: True
) -> list[T]:
    """Of the valid items those of which no other has both less memory and less time, by memory. key: (bytes,
    seconds)."""
    found, fastest = [], math.inf
    for item in sorted(items, key=key):
        if key(item)[1] < fastest and valid(item):
            found.append(item)
            fastest = key(item)[1]
    return found


def _spread(items: Sequence[T], most: int) -> list[T]:
    """At most `most` of them, evenly spread, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
