"""Phi-3 as data: Llama with sliding windows (arXiv 2404.14219), and from Phi-4-mini on heads that rotate in part
(2503.01743). No torch."""

from __future__ import annotations

from fivefold.models.llama import card as llama


class Card(llama.Card):
    summary = "llama with sliding windows and heads that rotate in part"
    attention_biases = free_heads = False
    windows = patterned = partly_rotated = True
