"""GLM-4 as data: see module.py for the paper. No torch."""

from __future__ import annotations

from fivefold.models.llama import card as llama


class Card(llama.Card):
    summary = "llama with norms around sublayers and heads that rotate in part"
    out_biased = False
    sandwich_norm = partly_rotated = True
