"""Clips the whole gradient by its norm (arXiv 1211.5063)."""

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
