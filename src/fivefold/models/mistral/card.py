"""Mistral as data: Llama with a sliding window in every block, or in all but some (arXiv 2310.06825). No torch."""

from __future__ import annotations

from fivefold.models.llama import card as llama


class Card(llama.Card):
    summary = "llama with sliding windows"
    attention_biases = False
    windows = patterned = True
