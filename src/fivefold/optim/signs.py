"""Steps whose elements are limited to the learning rate: Lion (arXiv 2302.06675) and Sophia (arXiv 2305.14342).

Sophia divides momentum by an estimate of the Hessian's diagonal. That of its published code (Gauss-Newton-Bartlett)
needs a further forward and backward every few steps (step/curvature.py). The empirical Fisher, which the paper
compares, needs none: it is tokens x g^2 of the step's own gradient, with the true labels.
"""

from __future__ import annotations

from fivefold.optim.card import OptimizerCard, OptimizerState, Tensor, Update

FISHER, LABELS = "fisher", "gnb"  # of `optim.estimator`; LABELS takes another forward and backward


def lion(g: Tensor, states: dict[str, Tensor], u: Update) -> Tensor:
    """The sign of a mean of momentum and gradient."""
    b1, b2 = u.fields["betas"]
    direction = states["exp_avg"].lerp(g, 1 - b1).sign_()
    states["exp_avg"].lerp_(g, 1 - b2)
    return direction


def sophia(g: Tensor, states: dict[str, Tensor], u: Update) -> Tensor:
    """Momentum over curvature, each element limited to 1 (algorithm 3). An estimate that is not finite, as of an
    overflow in fp16, leaves the average as it is."""
    b1, b2 = u.fields["betas"]
    mean, hessian = states["exp_avg"].lerp_(g, 1 - b1), states["hessian"]
    if u.estimate is not None:
        hessian.add_(u.estimate.sub_(hessian).nan_to_num_(0.0, 0.0, 0.0), alpha=1 - b2)
    elif u.fields["estimator"] == FISHER and (u.fresh or u.number % u.fields["estimate_every"] == 0):
        hessian.mul_(b2).addcmul_(g, g, value=(1 - b2) * u.tokens)
    return (mean / (hessian * u.fields["gamma"]).clamp_(min=u.fields["eps"])).clamp_(-1, 1)


CARDS = (
    OptimizerCard(
        "lion",
        source="arXiv 2302.06675",
        rule=lion,
        usual_lr=(1e-6, 5e-3),
        fields={"betas": (0.9, 0.99)},
        states=(OptimizerState("exp_avg"),),
        reads=2.0,
        width_power=1.0,
    ),
    OptimizerCard(
        "sophia",
        source="arXiv 2305.14342",
        rule=sophia,
        usual_lr=(1e-6, 0.01),
        fields={
            "betas": (0.965, 0.99),
            "eps": 1e-15,
            "gamma": 0.05,
            "estimator": FISHER,
            "estimate_every": 10,
        },
        states=(OptimizerState("exp_avg"), OptimizerState("hessian")),
        second_moment="hessian",
        reads=2.0,
    ),
)
