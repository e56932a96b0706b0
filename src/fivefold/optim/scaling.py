"""Factors on the gradient: it is clipped by its norm (arXiv 1211.5063), and in fp16 the loss is multiplied by one, so
that small gradients do not underflow (dynamic loss scaling, arXiv 1710.03740). The optimizer divides by it again.

An overflow halves that factor, and the step is skipped. After `every` steps without one the factor doubles. All ranks
decide the same, because they know the same norm. The host never waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROW, LARGE = 1024, 1 << 16
"""Elements of a row, and of the smallest tensor that is cut into rows."""


Norms = tuple[list[Tensor], list[Tensor]]
"""Norms of rows, each a vector, and of smaller parts, each a scalar, of one or several gradients."""


def norms(gradients: Sequence[Tensor]) -> Norms:
    """The norms that `sum_of_squares` adds up.

    On CPUs PyTorch's norm adds up all squares of a tensor in fp32, one after the other: with 20 million elements 1e-3
    of the sum is lost. So large tensors are cut into rows, and the sums of rows are added in fp64.
    """
    small, rows = [], []
    for gradient in gradients:
        if gradient.device.type == "cpu" and gradient.numel() >= LARGE:
            flat, whole = gradient.reshape(-1), gradient.numel() // ROW * ROW
            rows.append(torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1, dtype=torch.float32))
            gradient = flat[whole:]
        if gradient.numel():
            small.append(gradient)
    return rows, list(torch._foreach_norm(small, dtype=torch.float32)) if small else []


def sum_of_squares(
    gradients: Sequence[Tensor], device: torch.device | str = "cpu", found: Sequence[Norms] = ()
) -> Tensor:
    """Sum of squares over all elements of these gradients, wherever they are: a scalar in fp64 on `device`. found: the
    norms of others, computed before; they come first. Those of another device travel as one message."""
    places: dict[torch.device, Norms] = {}
    for rows, small in (*found, norms(gradients)):
        for kind, some in enumerate((rows, small)):
            for one in some:
                places.setdefault(one.device, ([], []))[kind].append(one)
    all_of_them = [
        torch.cat([*rows, torch.stack(small)] if small else rows).to(device)
        for rows, small in places.values()
    ]
    if not all_of_them:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.cat(all_of_them).double().square().sum()


def clip_scale(norm: Tensor, max_norm: float) -> Tensor | None:
    """The factor that limits the gradient's norm (scalar) to max_norm: an fp32 scalar on the norm's device. 0: None, it
    is never clipped.

    A norm that is not finite gives 1: the caller decides what to do.
    """
    if not max_norm:
        return None
    clipped = (norm > max_norm) & norm.isfinite()
    return torch.where(clipped, max_norm / norm, 1.0).float()


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
