"""Stochastic gradient descent: plain, with momentum (Polyak, 1964) and with Nesterov's (Sutskever et al., ICML 2013).

PyTorch's fused kernel over the fp32 master weights. With gradient g, weight decay d and momentum m:

    g = g + d * w
    v = m * v + g
    w = w - lr * v                 (nesterov: w - lr * (g + m * v); plain: w - lr * g)
"""

from dataclasses import replace

from fivefold.optim.card import OptimizerCard, OptimizerState, fused

MOMENTUM = OptimizerCard(
    "momentum",
    source="Polyak, 1964",
    build=fused("SGD"),
    usual_lr=(1e-5, 3.0),
    fields={"momentum": 0.9},
    states=(OptimizerState("momentum_buffer"),),
)
CARDS = (
    OptimizerCard("sgd", source="Robbins and Monro, 1951", build=fused("SGD"), usual_lr=(1e-4, 10.0)),
    MOMENTUM,
    replace(
        MOMENTUM, name="nesterov", source="Sutskever et al., ICML 2013", build=fused("SGD", nesterov=True)
    ),
)
