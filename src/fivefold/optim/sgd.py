"""Stochastic gradient descent: plain, with momentum (Polyak, 1964) and with Nesterov's (Sutskever et al., ICML 2013).

PyTorch's fused kernel over the fp32 master weights. With gradient g, weight decay d and momentum m:

    g = g + d * w
    v = m * v + g
    w = w - lr * v                 (nesterov: w - lr * (g + m * v); plain: w - lr * g)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fivefold.optim.card import OptimizerCard, OptimizerState

if TYPE_CHECKING:
    import torch


def sgd(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    import torch

    return torch.optim.SGD(groups, lr=lr, fused=True)


def momentum(groups: list[dict[str, Any]], lr: float, momentum: float) -> torch.optim.Optimizer:
    import torch

    return torch.optim.SGD(groups, lr=lr, momentum=momentum, fused=True)


def nesterov(groups: list[dict[str, Any]], lr: float, momentum: float) -> torch.optim.Optimizer:
    import torch

    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=True, fused=True)


VELOCITY = (OptimizerState("momentum_buffer"),)
CARDS = (
    OptimizerCard("sgd", source="Robbins and Monro, 1951", build=sgd, usual_lr=(1e-4, 10.0)),
    OptimizerCard(
        "momentum",
        source="Polyak, 1964",
        build=momentum,
        usual_lr=(1e-5, 3.0),
        fields={"momentum": 0.9},
        states=VELOCITY,
    ),
    OptimizerCard(
        "nesterov",
        source="Sutskever et al., ICML 2013",
        build=nesterov,
        usual_lr=(1e-5, 3.0),
        fields={"momentum": 0.9},
        states=VELOCITY,
    ),
)
