"""Learning rates of every weight from the gradients it has seen: AdaGrad, RMSprop, RAdam, NAdam, and Adam with SAGE.

PyTorch has the first four, but no kernel of them that changes nothing where `found_inf` is 1. So they are rules here;
tests hold them to PyTorch's. g: gradient, t: step.
"""

from __future__ import annotations

from dataclasses import replace

from fivefold.optim.adamw import MOMENTS
from fivefold.optim.card import OptimizerCard, OptimizerState, Tensor, Update

NADAM_DECAY = 4e-3  # of the momentum's schedule (Dozat, 2016)
TABLE = 256  # steps after which the product of all momenta, each about a half, is nothing beside 1
SAGE_EPS = 1e-16
SENSITIVITY = 0.75  # decay rate of the sensitivity (arXiv 2202.02664)


def adagrad(g: Tensor, states: dict[str, Tensor], u: Update) -> Tensor:
    """g / sqrt(sum of all g^2)."""
    total = states["sum"].addcmul_(g, g)
    return g / total.sqrt().add_(u.fields["eps"])


def rmsprop(g: Tensor, states: dict[str, Tensor], u: Update) -> Tensor:
    """g / sqrt(average of g^2)."""
    average = _average(states["square_avg"], g, u.fields["smoothing"])
    return g / average.sqrt().add_(u.fields["eps"])


def radam(g: Tensor, states: dict[str, Tensor], u: Update) -> Tensor:
    """Adam whose adaptive part begins when its variance is known: after a few steps (rho > 5). Until then it is
    momentum."""
    import torch

    (b1, b2), t = u.fields["betas"], u.step
    mean = states["exp_avg"].lerp_(g, 1 - b1)
    square = _average(states["exp_avg_sq"], g, b2)
    longest = 2 / (1 - b2) - 1
    rho = longest - 2 * t * b2**t / (1 - b2**t)
    trusted = (rho - 4) * (rho - 2) * longest / ((longest - 4) * (longest - 2) * rho)
    adaptive = (trusted.clamp(min=0) * (1 - b2**t)).sqrt() / square.sqrt().add_(u.fields["eps"])
    return mean / (1 - b1**t) * torch.where(rho > 5, adaptive, 1.0)


def nadam(g: Tensor, states: dict[str, Tensor], u: Update) -> Tensor:
    """Adam with Nesterov's momentum, which grows towards beta1."""
    import torch

    (b1, b2), t = u.fields["betas"], u.step
    mean = states["exp_avg"].lerp_(g, 1 - b1)
    square = _average(states["exp_avg_sq"], g, b2)
    now, following = (b1 * (1 - 0.5 * 0.96 ** ((t + later) * NADAM_DECAY)) for later in (0, 1))
    steps = torch.arange(1, TABLE + 1, dtype=torch.float64, device=g.device)
    products = (b1 * (1 - 0.5 * 0.96 ** (steps * NADAM_DECAY))).cumprod(0)  # of the momenta up to each step
    product = products.take((t - 1).clamp(max=TABLE - 1).long())
    direction = g * ((1 - now) / (1 - product)) + mean * (following / (1 - product * following))
    return direction / (square / (1 - b2**t)).sqrt_().add_(u.fields["eps"])


def adamsage(g: Tensor, states: dict[str, Tensor], u: Update) -> Tensor:
    """Adam times how much the sensitivity |w g| of a weight varies, in shares of its average: a weight that matters
    little gets a higher rate, one that matters a lower one.

    The average is divided by 1 - beta3^t before both uses, as in the authors' code (github.com/cliang1453/SAGE). Two
    constants are not theirs: that code adds eps^2 to the denominator only, not to the numerator, too, and Adam's eps to
    the root of the second moment before its correction, not after.
    """
    assert u.weight is not None
    (b1, b2), b3, t = u.fields["betas"], SENSITIVITY, u.step
    mean = states["exp_avg"].lerp_(g, 1 - b1)
    square = _average(states["exp_avg_sq"], g, b2)
    now = (u.weight * g).abs_()
    usual = states["sensitivity"].lerp_(now, 1 - b3) / (1 - b3**t)
    factor = (now - usual).abs_().add_(SAGE_EPS).div_(usual.add_(SAGE_EPS))
    return factor * (mean / (1 - b1**t)) / (square / (1 - b2**t)).sqrt_().add_(u.fields["eps"])


def _average(state: Tensor, g: Tensor, decay: float) -> Tensor:
    """The moving average of g^2."""
    return state.mul_(decay).addcmul_(g, g, value=1 - decay)


RADAM = OptimizerCard(
    "radam",
    source="arXiv 1908.03265",
    rule=radam,
    fields={"betas": (0.9, 0.999), "eps": 1e-8},
    states=MOMENTS,
    counts=True,
    second_moment="exp_avg_sq",
    coupled=True,
    reads=3.0,
)
CARDS = (
    OptimizerCard(
        "adagrad",
        source="Duchi et al., JMLR 2011",
        rule=adagrad,
        usual_lr=(1e-5, 0.3),
        fields={"eps": 1e-10},
        states=(OptimizerState("sum"),),
        second_moment="sum",
        coupled=True,
        reads=3.0,
    ),
    OptimizerCard(
        "rmsprop",
        source="Tieleman and Hinton, 2012",
        rule=rmsprop,
        fields={"smoothing": 0.99, "eps": 1e-8},
        states=(OptimizerState("square_avg"),),
        second_moment="square_avg",
        coupled=True,
        reads=3.0,
    ),
    RADAM,
    replace(RADAM, name="nadam", source="Dozat, ICLR workshop 2016", rule=nadam),
    replace(
        RADAM,
        name="adamsage",
        source="arXiv 2202.02664",
        rule=adamsage,
        fields={"betas": (0.9, 0.95), "eps": 1e-8},
        states=(*MOMENTS, OptimizerState("sensitivity")),
        coupled=False,
    ),
)
