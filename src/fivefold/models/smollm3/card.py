"""SmolLM3 as data: Llama with blocks that have no positions, `no_rope_every` (Hugging Face, 2025; NoPE: arXiv
2305.19466). No torch."""

from __future__ import annotations

from fivefold.models.llama import card as llama


class Card(llama.Card):
    summary = "llama whose every n-th block has no positions"
    unrotated = True
    eps, ties = 1e-6, True
