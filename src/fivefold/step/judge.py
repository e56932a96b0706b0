"""Judges a step by its loss and its gradient's norm: is it finite, is it a spike, may it change the weights? And the
update before it by the largest weight: has it destroyed the weights?

Loss and norm are sums over all ranks, so all of them judge alike. The verdict is a tensor that masks the update: the
host does not wait for it. It reads it with the loss, and then acts (train/faults.py).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.checkpoint.store import LARGEST
from fivefold.observe.faults import GROWTH, USUAL
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
    """usual: (2, 3) fp64, the statistics of loss and norm (step/judge.py). loss, norm, ruined (> 0 if the last
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
