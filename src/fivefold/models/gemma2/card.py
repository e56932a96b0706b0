"""Gemma 2 as data: see module.py for the paper. No torch."""

from __future__ import annotations

from fivefold.models.llama import card as llama


class Card(llama.Card):
    summary = "llama with caps on scores and logits, sliding windows, norms around sublayers, GELU gates"
    attention_biases = False
    sandwich_norm = unit_norms = windows = patterned = capped = scaled_scores = True
    eps, ties = 1e-6, True
