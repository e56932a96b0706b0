"""Steps whose elements are limited to the learning rate: Lion (arXiv 2302.06675) and Sophia (arXiv 2305.14342)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.optim.card import OptimizerCard, OptimizerState, Update

if TYPE_CHECKING:
    from torch import Tensor


def lion(g: Tensor, states: dict[str, Tensor], u: Update) -> Tensor:
    """The sign of a mean of momentum and gradient."""
    b1, b2 = u.fields["betas"]
    direction = states["exp_avg"].lerp(g, 1 - b1).sign_()
    states["exp_avg"].lerp_(g, 1 - b2)
    return direction


CARDS = (
    OptimizerCard(
        "lion",
        source="arXiv 2302.06675",
        rule=lion,
        fields={"betas": (0.9, 0.99)},
        states=(OptimizerState("exp_avg"),),
        reads=2.0,
    ),
)
