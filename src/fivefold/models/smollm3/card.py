"""SmolLM3 as data: see module.py for the paper. No torch."""

from __future__ import annotations

from typing import Any

from fivefold.models.llama import card as llama


class Card(llama.Card):
    summary = "llama whose every n-th block has no positions"
    unrotated = True

    def defaults(self) -> dict[str, Any]:
        return super().defaults() | {"norm_eps": 1e-6, "tie_embeddings": True}
