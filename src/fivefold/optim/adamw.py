"""AdamW (arXiv 1711.05101) and Adam (arXiv 1412.6980): fused kernels over the fp32 master weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fivefold.optim.card import OptimizerCard, OptimizerState

if TYPE_CHECKING:
    import torch


def adamw(
    groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """Builds AdamW. Weight decay is decoupled: a step also subtracts lr * weight_decay of each weight."""
    from fivefold.kernels.adamw import AdamW

    return AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def adam(
    groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """Builds Adam. Weight decay is added to the gradient."""
    import torch

    return torch.optim.Adam(groups, lr=lr, betas=betas, eps=eps, fused=True)


MOMENTS = (OptimizerState("exp_avg"), OptimizerState("exp_avg_sq"))
ADAMW = OptimizerCard(
    "adamw",
    source="arXiv 1711.05101",
    build=adamw,
    fields={"betas": (0.9, 0.95), "eps": 1e-8},
    states=MOMENTS,
    counts=True,
    second_moment="exp_avg_sq",
    finds_largest=True,
)
CARDS = (
    ADAMW,
    replace(ADAMW, name="adam", source="arXiv 1412.6980", build=adam, finds_largest=False),
)
