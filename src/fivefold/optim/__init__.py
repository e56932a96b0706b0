"""Optimizers by name, outer optimizers, learning-rate schedules. No torch.

A new optimizer is a file in this folder, with its CARDS listed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from fivefold.optim import adamw, adaptive, muon, sgd, signs, small_states, soap
from fivefold.optim.card import OptimizerCard, kept_in, rounding_traffic, update_traffic

_FAMILIES = (adamw, sgd, adaptive, small_states, signs, soap, muon)
OPTIMIZERS: dict[str, OptimizerCard] = {card.name: card for family in _FAMILIES for card in family.CARDS}
DEFAULT = "adamw"
FIELDS = tuple(dict.fromkeys(name for card in OPTIMIZERS.values() for name in card.fields))
"""The fields of [optim] that only some optimizers have."""


@dataclass(frozen=True)
class OuterOptimizer:
    """An optimizer of training on several replica groups. The outer gradient is the mean over replica groups of (common
    weights - a replica group's own weights). card: of the optimizer over the common weights. lr, fields: its
    defaults."""

    card: OptimizerCard
    lr: float
    fields: Mapping[str, float] = field(default_factory=dict)


OUTER = {
    # Takes the mean weights (local SGD, arXiv 1805.09767).
    "local": OuterOptimizer(OPTIMIZERS["sgd"], 1.0),
    # arXiv 2311.08105, with its lr. The momentum is the best of those measured (docs/parallelism/low_communication.md).
    "diloco": OuterOptimizer(OPTIMIZERS["nesterov"], 0.7, {"momentum": 0.6}),
}
"""By `sync.method`."""


def lowest_rate(lr: float) -> float:
    """Where a schedule ends that does not say it: a tenth of the peak rate."""
    return float(f"{lr / 10:.12g}")


def learning_rate(
    step: int,
    *,
    total: int,
    warmup: int,
    lr: float,
    min_lr: float,
    schedule: str,
    decay_fraction: float = 0.2,
    cycle: int = 0,
    growth: float = 1.0,
) -> float:
    """Learning rate of step 0..total-1.

    Linear warm-up from lr/warmup to lr; then `cosine` or `linear` down to min_lr at the last step, `wsd` (arXiv
    2404.06395: lr, then linear decay over the last decay_fraction of the run), `constant`, or `restarts` (arXiv
    1608.03983: cosines from lr to min_lr, the first over `cycle` steps, each next one `growth` times as long).
    """
    if step < warmup:
        return lr * (step + 1) / warmup
    if schedule == "constant":
        return lr
    start = warmup
    if schedule == "restarts":
        start, length = warmup, float(cycle)
        while step >= start + round(length):
            start, length = start + round(length), length * growth
        total = start + round(length)
    if schedule == "wsd":
        # The last step always decays.
        start = min(max(warmup, round(total * (1 - decay_fraction))), total - 1)
    progress = min(1.0, max(0, step - start + 1) / max(1, total - start))
    shape = (1 + math.cos(math.pi * progress)) / 2 if schedule in ("cosine", "restarts") else 1 - progress
    return min_lr + (lr - min_lr) * shape
