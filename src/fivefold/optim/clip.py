"""Clipping by the norm of the whole gradient (arXiv 1211.5063)."""

from __future__ import annotations

from torch import Tensor


def clip_(flat_grads: Tensor, max_norm: float) -> float:
    """Scales the gradient down to max_norm where it is larger (0: never). Returns the norm before.

    A norm that is not finite leaves the gradient as it is: the caller decides.
    """
    norm = flat_grads.norm().item()
    if 0 < max_norm < norm < float("inf"):
        flat_grads.mul_(max_norm / norm)
    return norm
