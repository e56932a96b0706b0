"""Learning rate as a function of the step."""

from __future__ import annotations

import math


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
        start = min(
            max(warmup, round(total * (1 - decay_fraction))), total - 1
        )  # the last step always decays
    progress = min(1.0, max(0, step - start + 1) / max(1, total - start))
    shape = (1 + math.cos(math.pi * progress)) / 2 if schedule in ("cosine", "restarts") else 1 - progress
    return min_lr + (lr - min_lr) * shape
