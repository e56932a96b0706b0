"""GPT-2 as data: see module.py for the paper. No torch."""

from __future__ import annotations

from typing import Any

from fivefold.models import card
from fivefold.models.tables import attention, block, gelu, layer_norm, under
from fivefold.sharding.parts import Shape


class Card(card.Card):
    summary = "LayerNorm, learned positions, GELU"
    words = card.Card.words | {"ffn_dim": "4 D"}
    biased = True

    def defaults(self) -> dict[str, Any]:
        return {
            "kv_heads": self.model.heads,
            "ffn_dim": 4 * self.model.dim,
            "tie_embeddings": True,
            "norm_eps": 1e-5,
        }

    def table(self) -> dict[str, Shape]:
        V, D, T = self.model.vocab_size or 0, self.model.dim, self.model.seq_len
        embeddings: dict[str, Shape] = {"embed.weight": (V, D), "embed_positions.weight": (T, D)}
        return embeddings | self.blocks() | under("norm", layer_norm(D)) | self.output()

    def block(self, number: int) -> dict[str, Shape]:
        D, F = self.model.dim, self.model.ffn_dim or 0
        return block(layer_norm(D), attention(self.model, bias=True), gelu(D, F), self.post_norm)
