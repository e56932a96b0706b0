"""The frontier of a search: layouts that no other beats in both throughput and memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fivefold.spread.layout_text import to_text

if TYPE_CHECKING:
    from fivefold.plan.predict import Plan
    from fivefold.plan.search import Found

STEPS = 32


def frontier(found: Found) -> list[Plan]:
    """The fastest layout for each memory size, from the least memory to the most.

    It starts with the best plan. Each next one is the fastest that takes less memory, by at least 1/32 of the best
    plan's.
    """
    plans = found.plans[:1]
    gap = plans[0].peak_bytes / STEPS if plans else 0
    while plans and (following := found.within(plans[-1].peak_bytes - gap)):
        plans.append(following)
    return plans[::-1]


def as_rows(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """Rows of the page's table, one per plan."""
    return [
        {
            "peak": plan.peak_bytes,
            "tokens_per_s": plan.tokens_per_s,
            "words": f"{to_text(plan.layout)}, microbatch {plan.setting.sizes.B}",
        }
        for plan in plans
    ]
