"""The outer optimizers of training on several sites, as data. No torch.

The outer gradient is the mean over sites of (common weights - a site's own weights). `local` takes the mean weights
(local SGD, arXiv 1805.09767): a step of sgd with lr 1. `diloco` (arXiv 2311.08105) takes a step with Nesterov's
momentum, with the paper's lr. Its momentum is the best of those measured (docs/parallelism/low_communication.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fivefold.optim.card import OptimizerCard
from fivefold.optim.registry import OPTIMIZERS


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
