"""Dynamic loss scaling (arXiv 1710.03740): the loss is multiplied by a factor, so that small gradients do not underflow
in fp16. The optimizer divides by it again.

An overflow halves the factor, and the step is skipped. After `every` steps without one the factor doubles. All ranks
decide the same, because they know the same norm. The host never waits for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOWEST, HIGHEST = 1.0, 2.0**24


class LossScale:
    """The factor and its history. values: (3) fp64 on the device: the factor, a power of two, the steps without an
    overflow since it last changed, and the overflows that have halved it."""

    def __init__(self, initial: float, every: int, device: torch.device):
        self.every = every
        self.values = torch.tensor([initial, 0.0, 0.0], dtype=torch.float64, device=device)

    @property
    def factor(self) -> Tensor:
        """A scalar, fp32."""
        return self.values[0].float()

    def update(self, skip: Tensor) -> Tensor:
        """Learns whether a step was skipped (scalar: 1 or 0). Returns 1 if a lower factor may prevent that, else 0."""
        factor, good, overflows = self.values.unbind()
        lowered = skip * (factor > LOWEST)
        good = (good + 1) * (1 - skip)
        grows = good >= self.every
        grown = torch.where(grows, factor * 2, factor)
        factor = torch.where(skip > 0, factor / 2, grown).clamp(LOWEST, HIGHEST)
        self.values = torch.stack([factor, torch.where(grows, 0.0, good), overflows + lowered])
        return lowered

    @property
    def overflows(self) -> Tensor:
        """The steps whose overflow has halved the factor: a scalar, fp64."""
        return self.values[2]

    def set(self, factor: float, good: float, overflows: float = 0.0) -> None:
        self.values = self.values.new_tensor([factor, good, overflows])
