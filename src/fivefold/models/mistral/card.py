"""Mistral as data: see module.py for the paper. No torch."""

from __future__ import annotations

from fivefold.models.llama import card as llama


class Card(llama.Card):
    summary = "llama with sliding windows"
    attention_biases = False
    windows = patterned = True
