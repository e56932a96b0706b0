"""All optimizers by name. A new one is a file in this folder, with its CARDS listed here. No torch."""

from __future__ import annotations

from fivefold.optim import adamw, sgd
from fivefold.optim.card import OptimizerCard

OPTIMIZERS: dict[str, OptimizerCard] = {card.name: card for card in (*adamw.CARDS, *sgd.CARDS)}
DEFAULT = "adamw"
FIELDS = tuple(dict.fromkeys(name for card in OPTIMIZERS.values() for name in card.fields))
"""The fields of [optim] that only some optimizers have."""
