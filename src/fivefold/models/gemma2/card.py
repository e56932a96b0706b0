"""Gemma 2 as data: see module.py for the paper. No torch."""

from __future__ import annotations

from typing import Any

from fivefold.models.llama import card as llama
from fivefold.models.tables import unit_rms_norm
from fivefold.sharding.parts import Shape


class Card(llama.Card):
    summary = "llama with caps on scores and logits, sliding windows, norms around sublayers, GELU gates"
    attention_biases = False
    sandwich_norm = windows = patterned = capped = scaled_scores = True

    def defaults(self) -> dict[str, Any]:
        return super().defaults() | {"norm_eps": 1e-6, "tie_embeddings": True}

    def norm(self, D: int) -> dict[str, Shape]:
        return unit_rms_norm(D)
