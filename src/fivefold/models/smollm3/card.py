"""SmolLM3 as data: see module.py for the paper. No torch."""

from __future__ import annotations

from fivefold.models.llama import card as llama


class Card(llama.Card):
    summary = "llama whose every n-th block has no positions"
    unrotated = True
    eps, ties = 1e-6, True
