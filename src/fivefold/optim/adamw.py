"""AdamW (arXiv 1711.05101): PyTorch's fused kernel over the fp32 master weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


def build_adamw(
    master: Mapping[str, Tensor],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.optim.AdamW:
    """The optimizer of the named weights. Weight decay applies to matrices only: norms and biases have one dim."""
    groups = [
        {"params": [w for w in master.values() if w.dim() >= 2], "weight_decay": weight_decay},
        {"params": [w for w in master.values() if w.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, eps=eps, fused=True)


def state_tensors(optimizer: torch.optim.Optimizer, master: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """{"exp_avg.NAME": ..., "exp_avg_sq.NAME": ...}; empty before the first step."""
    return {
        f"{moment}.{name}": optimizer.state[weight][moment]
        for name, weight in master.items()
        if weight in optimizer.state
        for moment in MOMENTS
    }


def load_state(
    optimizer: torch.optim.Optimizer, master: Mapping[str, Tensor], tensors: Mapping[str, Tensor], steps: int
) -> None:
    """Sets the moments from `state_tensors`, and the count of steps taken.

    Raises:
        KeyError: a moment is missing.
    """
    for name, weight in master.items():
        moments = {m: tensors[f"{m}.{name}"].to(weight.device, copy=True) for m in MOMENTS}
        optimizer.state[weight] = {"step": torch.tensor(float(steps), device=weight.device), **moments}
