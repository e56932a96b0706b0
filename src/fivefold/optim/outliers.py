"""Gradients whose norm is far above those of the last steps: their updates are skipped.

The logarithm of the norm has a running mean and variance, over about 50 steps. All ranks have the same norm, so they
decide alike, and the host is not asked.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 50  # that the averages cover
FIRST = 20  # steps before anything is skipped


def outlier(norms: Tensor, norm: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """(1 if a norm is an outlier, else 0: a scalar, the statistics with it). norms: (3) fp64: how many norms they have
    seen, mean and variance of their logarithms. norm: a scalar. limit: in standard deviations.

    An outlier counts as one at the limit, so that a norm which stays high becomes the usual one. A norm that is not
    finite or 0 counts as nothing.
    """
    count, mean, variance = norms.unbind()
    value, deviation = norm.double().log(), variance.sqrt()
    most = mean + limit * deviation
    found = (value > most) & (count >= FIRST) & value.isfinite()
    value = torch.where(found, most, value)
    share = (1 / (count + 1)).clamp(min=1 / STEPS)
    apart = value - mean
    after = torch.stack([count + 1, mean + share * apart, (1 - share) * (variance + share * apart.square())])
    return found.double(), torch.where(value.isfinite(), after, norms)
