"""Checks that a layout fills its ranks, and finds the valid ones that are most like it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, islice

from fivefold.errors import UserError
from fivefold.schedules.collectives.choose import AUTO
from fivefold.schedules.compression import NONE
from fivefold.sharding.layout import AXES, Layout
from fivefold.sharding.layout_rules import problems
from fivefold.sharding.layout_text import equation, to_text
from fivefold.sharding.shares import divisors

MANY_DIVISORS = 40
"""Numbers of ranks with more divisors can be divided between the axes in more than 10,000 ways."""


def anything(layout: Layout) -> bool:
    """Allows every layout; the default of `validate`."""
    return True


def validate(layout: Layout, ranks: int, allowed: Callable[[Layout], bool] = anything) -> None:
    """Checks that a layout is valid and fills exactly `ranks` ranks. allowed: True for the layouts that suit the model
    and its batch; only these are proposed.

    Raises:
        UserError: with the equation that does not hold and the nearest layouts that do.
    """
    found = [message for _, message in problems(layout)]
    if layout.ranks != ranks:
        product = equation(layout).removesuffix("s").removesuffix(" rank")
        found.insert(0, f"{product}, but there are {ranks} rank{'s' * (ranks != 1)}")
    if found:
        raise UserError(f"layout '{to_text(layout)}': {'; '.join(found)}{_proposal(layout, ranks, allowed)}")


def _proposal(layout: Layout, ranks: int, allowed: Callable[[Layout], bool]) -> str:
    """The nearest valid layouts with `ranks` ranks; if there are none, the nearest with fewer."""
    powers = (2**k for k in range(ranks.bit_length() - 1, -1, -1))
    for fewer in (*range(ranks, max(0, ranks - 9), -1), *powers):
        if near := nearest(layout, fewer, 3 if fewer == ranks else 1, allowed):
            text = " or ".join(to_text(candidate) for candidate in near)
            other = (
                ""
                if fewer == ranks
                else f" ({fewer} rank{'s' * (fewer != 1)}; the model has no layout for {ranks})"
            )
            return f". Nearest valid: {text}{other}"
    return ""


def nearest(
    layout: Layout, ranks: int, count: int = 3, allowed: Callable[[Layout], bool] = anything
) -> list[Layout]:
    """The valid layouts with `ranks` ranks that are most like `layout`: the axes change by the fewest doublings, and
    unused axes stay unused if possible. ZeRO is set to 1 where states must be shared, and to 0 where no ranks can share
    them; gradients are summed as by default where their algorithm is not for so many ranks, and without ZeRO++ where
    that does not fit."""

    def distance(candidate: Layout) -> float:
        pairs = [(getattr(layout, axis), getattr(candidate, axis)) for axis in AXES]
        doublings = sum(abs(math.log2(new / old)) + (old == 1 < new) for old, new in pairs)
        others = sum(
            getattr(candidate, name) != getattr(layout, name) for name in ("zero", "all_reduce", "zeropp")
        )
        return doublings + 0.5 * others

    stages = {0, layout.zero, layout.zero or (1 if layout.dp_shard > 1 else 0)}
    candidates = [
        replace(layout, zero=zero, all_reduce=all_reduce, zeropp=plus, **dict(zip(AXES, sizes, strict=True)))
        for all_reduce in dict.fromkeys((layout.all_reduce, AUTO))
        for plus in dict.fromkeys((layout.zeropp, NONE))
        for sizes in _sizes(layout, ranks)
        for zero in sorted(stages)
    ]
    candidates.sort(key=distance)
    return list(islice((c for c in candidates if not any(problems(c)) and allowed(c)), count))


def _sizes(layout: Layout, ranks: int) -> Iterator[tuple[int, ...]]:
    """Sizes of all axes whose product is `ranks`. If there are too many of them (720720 ranks have 656250), those with
    at most two other sizes than the layout, or than one rank."""
    if len(divisors(ranks)) <= MANY_DIVISORS:
        yield from _factor(ranks, len(AXES))
        return
    found = set()
    for base in (tuple(layout.sizes.values()), (1,) * len(AXES)):
        for first, second in combinations(range(len(AXES)), 2):
            kept = math.prod(size for axis, size in enumerate(base) if axis not in (first, second))
            if ranks % kept == 0:
                for one, other in _factor(ranks // kept, 2):
                    sizes = list(base)
                    sizes[first], sizes[second] = one, other
                    found.add(tuple(sizes))
    yield from sorted(found)


def _factor(product: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `product` as `count` ordered factors."""
    if count == 1:
        yield (product,)
        return
    for first in divisors(product):
        for rest in _factor(product // first, count - 1):
            yield (first, *rest)
