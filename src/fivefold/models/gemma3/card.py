"""Gemma 3 as data: see module.py for the paper. No torch."""

from __future__ import annotations

from fivefold.models.qwen3 import card as qwen3


class Card(qwen3.Card):
    summary = "qwen3 with sliding windows in most blocks, norms around sublayers, GELU gates"
    attention_biases = False
    sandwich_norm = unit_norms = ties = windows = patterned = local_rotation = scaled_scores = True
    regional = tuple(f"attention.{norm}.delta" for norm in qwen3.NORMS)
