"""Steps whose elements are limited to the learning rate: Lion (arXiv 2302.06675) and Sophia (arXiv 2305.14342).

Sophia divides momentum by an estimate of the Hessian's diagonal. The paper's estimators need a further backward pass of
their own every few steps: of labels that the model draws (Gauss-Newton-Bartlett), or a Hessian-vector product
(Hutchinson). Here the estimate is that of the step's own gradient with the true labels, tokens x g^2, which the paper
compares as the empirical Fisher. It needs no further pass and no random numbers, so it is the same in every layout.
"""

from __future__ import annotations

from fivefold.optim.card import OptimizerCard, OptimizerState, Tensor, Update


def lion(g: Tensor, states: dict[str, Tensor], u: Update) -> Tensor:
    """The sign of a mean of momentum and gradient."""
    b1, b2 = u.fields["betas"]
    direction = states["exp_avg"].lerp(g, 1 - b1).sign_()
    states["exp_avg"].lerp_(g, 1 - b2)
    return direction


def sophia(g: Tensor, states: dict[str, Tensor], u: Update) -> Tensor:
    """Momentum over curvature, each element limited to 1."""
    b1, b2 = u.fields["betas"]
    mean = states["exp_avg"].lerp_(g, 1 - b1)
    if u.fresh or u.number % u.fields["estimate_every"] == 0:
        states["hessian"].mul_(b2).addcmul_(g, g, value=(1 - b2) * u.tokens)
    return (mean / (states["hessian"] * u.fields["gamma"]).add_(u.fields["eps"])).clamp_(-1, 1)


CARDS = (
    OptimizerCard(
        "lion",
        source="arXiv 2302.06675",
        rule=lion,
        usual_lr=(1e-6, 5e-3),
        fields={"betas": (0.9, 0.99)},
        states=(OptimizerState("exp_avg"),),
        reads=2.0,
    ),
    OptimizerCard(
        "sophia",
        source="arXiv 2305.14342, empirical Fisher",
        rule=sophia,
        usual_lr=(1e-6, 0.01),
        fields={"betas": (0.965, 0.99), "eps": 1e-15, "gamma": 0.05, "estimate_every": 10},
        states=(OptimizerState("exp_avg"), OptimizerState("hessian")),
        second_moment="hessian",
        reads=2.0,
    ),
)
