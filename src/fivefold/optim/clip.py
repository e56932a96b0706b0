"""Clips the whole gradient by its norm (arXiv 1211.5063)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_of_squares(gradients: Sequence[Tensor]) -> Tensor:
    """Sum of squares over all elements of these gradients: a scalar in fp64."""
    there = [g for g in gradients if g.numel()]
    norms = torch._foreach_norm(there) if there else []
    return torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)


def clip_scale(norm: float, max_norm: float) -> float:
    """The factor that limits the gradient's norm to max_norm. 0: it is never clipped.

    A norm that is not finite gives 1: the caller decides what to do.
    """
    return max_norm / norm if 0 < max_norm < norm < float("inf") else 1.0
