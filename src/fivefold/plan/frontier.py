"""Throughput against memory: layouts that no other beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fivefold.layout import to_text

if TYPE_CHECKING:
    from fivefold.plan.predict import Plan


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
