"""Phi-3 as data: see module.py for the paper. No torch."""

from __future__ import annotations

from fivefold.models.llama import card as llama


class Card(llama.Card):
    summary = "llama with sliding windows and heads that rotate in part"
    attention_biases = free_heads = False
    windows = patterned = partly_rotated = True
