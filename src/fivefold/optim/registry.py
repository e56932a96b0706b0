"""All optimizers by name. A new one is a file in this folder, with its CARDS listed here. No torch.

Below them, the outer optimizers of training on several sites. The outer gradient is the mean over sites of (common
weights - a site's own weights). `local` takes the mean weights (local SGD, arXiv 1805.09767): a step of sgd with lr 1.
`diloco` (arXiv 2311.08105) takes a step with Nesterov's momentum, with the paper's lr. Its momentum is the best of
those measured (docs/parallelism/low_communication.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fivefold.optim import adafactor, adamw, adaptive, eight_bit, muon, sgd, signs, soap
from fivefold.optim.card import OptimizerCard

_FAMILIES = (adamw, sgd, adaptive, eight_bit, adafactor, signs, soap, muon)
OPTIMIZERS: dict[str, OptimizerCard] = {card.name: card for family in _FAMILIES for card in family.CARDS}
DEFAULT = "adamw"
FIELDS = tuple(dict.fromkeys(name for card in OPTIMIZERS.values() for name in card.fields))
"""The fields of [optim] that only some optimizers have."""


@dataclass(frozen=True)
class OuterOptimizer:
    """card: of the optimizer over the common weights. lr, fields: its defaults."""

    card: OptimizerCard
    lr: float
    fields: Mapping[str, float] = field(default_factory=dict)


OUTER = {
    "local": OuterOptimizer(OPTIMIZERS["sgd"], 1.0),
    "diloco": OuterOptimizer(OPTIMIZERS["nesterov"], 0.7, {"momentum": 0.6}),
}
"""By `sync.method`."""
