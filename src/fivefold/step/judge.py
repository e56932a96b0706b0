"""Judges a step by its loss and its gradient's norm: is it finite, is it a spike, may it change the weights? And the
update before it by the largest weight: has it destroyed the weights?

Loss and norm are sums over all ranks, so all of them judge alike. The verdict is a tensor that masks the update: the
host does not wait for it. It reads it with the loss, and then acts (train/faults.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.checkpoint.store import LARGEST
from fivefold.observe.faults import GROWTH, USUAL
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


def destroyed(largest: Tensor, limit: Tensor | None) -> tuple[Tensor, Tensor]:
    """(1 if an update has destroyed weights of this rank, else 0; the limit for the next): fp32 scalars. largest: the
    largest |weight| after it, NaN if any is. limit: as returned after the update before; None: that is not known.

    Weights that are not finite or beyond LARGEST are destroyed, and so is what has grown to GROWTH times the largest
    one in a single step. Those below 1 count as 1: they may start at zero.
    """
    wrong = (~(largest <= (LARGEST if limit is None else limit))).float()
    return wrong, (GROWTH * largest).clamp(GROWTH, LARGEST)


def judge(usual: Tensor, loss: Tensor, norm: Tensor, faults: FaultsSection, ruined: Tensor) -> Verdict:
    """usual: (2, 3) fp64, the statistics of loss and norm (optim/outliers.py). loss, norm, ruined (> 0 if the last
    update has destroyed weights): fp64 scalars, equal on all ranks."""
    ruined = (ruined > 0).float()
    bad = 1 - (loss.isfinite() & norm.isfinite()).float()
    skip = torch.maximum(bad, ruined)
    if not faults.spike_limit:
        return Verdict(bad, skip, usual, {"destroyed": ruined})
    found, after = outlier(usual, torch.stack([loss, norm]), faults.spike_limit)
    if faults.on_spike != "tell":
        skip = torch.maximum(skip, found.amax().float())
    means = after[:, 1].exp()
    figures = {"destroyed": ruined, "spike": found[LOSS], "outlier": found[NORM]}
    return Verdict(bad, skip, after, {**figures, **dict(zip(USUAL, means.unbind(), strict=True))})
