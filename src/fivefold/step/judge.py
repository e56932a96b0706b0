"""Judges a step by its loss and its gradient's norm: is it finite, is it a spike, may it change the weights?

Loss and norm are sums over all ranks, so all of them judge alike. The verdict is a tensor that masks the update: the
host does not wait for it. It reads it with the loss, and then acts (train/faults.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.observe.faults import USUAL
from fivefold.optim.outliers import outlier
from fivefold.recipe import FaultsSection

LOSS, NORM = range(2)  # rows of the statistics


class Verdict(NamedTuple):
    """bad: 1 if loss or gradient are not finite. skip: 1 if the step may not change the weights. Both are fp32 scalars
    on the device. usual: the statistics with this step. figures: by their names in observe/faults.py."""

    bad: Tensor
    skip: Tensor
    usual: Tensor
    figures: dict[str, Tensor]


def judge(usual: Tensor, loss: Tensor, norm: Tensor, faults: FaultsSection) -> Verdict:
    """usual: (2, 3) fp64, the statistics of loss and norm (optim/outliers.py). loss, norm: fp64 scalars, equal on all
    ranks."""
    bad = 1 - (loss.isfinite() & norm.isfinite()).float()
    if not faults.spike_limit:
        return Verdict(bad, bad, usual, {})
    found, after = outlier(usual, torch.stack([loss, norm]), faults.spike_limit)
    skip = bad if faults.on_spike == "tell" else torch.maximum(bad, found.amax().float())
    means = after[:, 1].exp()
    figures = {"spike": found[LOSS], "outlier": found[NORM]}
    return Verdict(bad, skip, after, {**figures, **dict(zip(USUAL, means.unbind(), strict=True))})
