"""Qwen2 as data: Llama with biases of queries, keys and values (arXiv 2407.10671). No torch."""

from __future__ import annotations

from fivefold.models.llama import card as llama


class Card(llama.Card):
    summary = "llama with biases of queries, keys and values"
    attention_biases, qkv_biased, out_biased = False, True, False
    eps = 1e-6
