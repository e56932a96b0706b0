"""Throughput against memory: layouts that no other beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fivefold.layout import to_text

if TYPE_CHECKING:
    from fivefold.plan.predict import Plan
    from fivefold.plan.search import Found

STEPS = 32


def frontier(found: Found) -> list[Plan]:
    """From the least memory to the most, the fastest layout of all that take no more: the best plan, and then always
    the fastest that takes less by at least a 32nd of the best one's memory."""
    plans = found.plans[:1]
    gap = plans[0].peak_bytes / STEPS if plans else 0
    while plans and (following := found.within(plans[-1].peak_bytes - gap)):
        plans.append(following)
    return plans[::-1]


def as_rows(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """What the page shows of each."""
    return [
        {
            "peak": plan.peak_bytes,
            "tokens_per_s": plan.tokens_per_s,
            "words": f"{to_text(plan.layout)}, microbatch {plan.setting.sizes.B}",
        }
        for plan in plans
    ]
