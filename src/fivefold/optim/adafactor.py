"""Adafactor (arXiv 1804.04235): of a matrix's squared gradients only the averages of rows and columns are kept.

An update whose root mean square is beyond LONGEST is shortened. The learning rate is the recipe's, not relative
to the size of the weights. Otherwise it is torch.optim.Adafactor, which waits for the device twice per parameter.
"""

from __future__ import annotations

from fivefold.optim.card import OptimizerCard, OptimizerState, Tensor, Update

EPS = 2.0**-23
DECAY = -0.8  # the averages take in a share of t^DECAY of the squared gradients in step t
LONGEST = 1.0
"""Root mean square of a matrix's update."""


def adafactor(g: Tensor, states: dict[str, Tensor], u: Update) -> Tensor:
    weight = u.step**DECAY
    dims = tuple(range(max(0, g.dim() - 2), g.dim()))
    if "variance" in states:
        variance = states["variance"].lerp_(g.square(), weight.float()).clone()
    else:  # (..., r, 1) x (..., 1, c)
        rows = states["rows"].lerp_(g.square().mean(-1, keepdim=True), weight.float())
        columns = states["columns"].lerp_(g.square().mean(-2, keepdim=True), weight.float())
        variance = (rows @ columns).div_(rows.mean(-2, keepdim=True).clamp(min=EPS))
    direction = variance.clamp_(min=EPS * EPS).rsqrt_().mul_(g)
    size = direction.square().mean(dims, keepdim=True).sqrt()
    return direction.div_((size / LONGEST).clamp_(min=1.0))


CARDS = (
    OptimizerCard(
        "adafactor",
        source="arXiv 1804.04235",
        rule=adafactor,
        states=(
            OptimizerState("rows", shape=lambda shape: (*shape[:-1], 1) if len(shape) > 1 else None),
            OptimizerState(
                "columns", shape=lambda shape: (*shape[:-2], 1, shape[-1]) if len(shape) > 1 else None
            ),
            OptimizerState("variance", shape=lambda shape: shape if len(shape) < 2 else None),
        ),
        counts=True,
        needs="matrices",
        reads=4.0,
    ),
)
