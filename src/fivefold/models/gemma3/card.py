"""Gemma 3 as data: see module.py for the paper. No torch."""

from __future__ import annotations

from typing import Any

from fivefold.models.qwen3 import card as qwen3
from fivefold.models.tables import unit_rms_norm
from fivefold.sharding.parts import Shape


class Card(qwen3.Card):
    summary = "qwen3 with sliding windows in most blocks, norms around sublayers, GELU gates"
    attention_biases = False
    sandwich_norm = windows = patterned = local_rotation = scaled_scores = True
    regional = tuple(f"attention.{norm}.delta" for norm in qwen3.NORMS)

    def defaults(self) -> dict[str, Any]:
        return super().defaults() | {"tie_embeddings": True}

    def norm(self, D: int) -> dict[str, Shape]:
        return unit_rms_norm(D)
