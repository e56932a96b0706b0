"""All optimizers by name. A new one is a file in this folder, with its CARDS listed here. No torch."""

from __future__ import annotations

from fivefold.optim import adafactor, adamw, adaptive, eight_bit, muon, sgd, signs, soap
from fivefold.optim.card import OptimizerCard

_FAMILIES = (adamw, sgd, adaptive, eight_bit, adafactor, signs, soap, muon)
OPTIMIZERS: dict[str, OptimizerCard] = {card.name: card for family in _FAMILIES for card in family.CARDS}
DEFAULT = "adamw"
FIELDS = tuple(dict.fromkeys(name for card in OPTIMIZERS.values() for name in card.fields))
"""The fields of [optim] that only some optimizers have."""
