"""Losses and norms of the gradient that are far above those of the last steps.

Their logarithms have a running mean and variance, over about 50 steps. All ranks have the same numbers, so they decide
alike, and the host is not asked.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

STEPS = 50  # that the averages cover
FIRST = 20  # steps before anything is an outlier
LEAST = math.log(1.2)  # above the mean: a curve without noise has a tiny deviation


def outlier(stats: Tensor, value: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """(1 where a value is an outlier, else 0: fp64, the statistics with it). stats: (..., 3) fp64: how many values they
    have seen, mean and variance of their logarithms. value: (...). limit: in standard deviations.

    An outlier counts as one at the limit, so that a value which stays high becomes the usual one. A value that is not
    finite or 0 counts as nothing.
    """
    count, mean, variance = stats.unbind(-1)
    value = value.double().log()
    most = mean + (limit * variance.sqrt()).clamp(min=LEAST)
    found = (value > most) & (count >= FIRST) & value.isfinite()
    value = torch.where(found, most, value)
    share = (1 / (count + 1)).clamp(min=1 / STEPS)
    apart = value - mean
    after = torch.stack(
        [count + 1, mean + share * apart, (1 - share) * (variance + share * apart.square())], -1
    )
    return found.double(), torch.where(value.isfinite().unsqueeze(-1), after, stats)
