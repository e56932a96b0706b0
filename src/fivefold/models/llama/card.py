"""Llama as data: see module.py for the papers. No torch."""

from __future__ import annotations

from typing import Any

from fivefold.models import card, delta_work
from fivefold.models.card import round_up
from fivefold.models.tables import attention, block, rms_norm, swiglu, under, unit_rms_norm
from fivefold.sharding.parts import Shape


class Card(card.Card):
    summary = "RMSNorm, RoPE, SwiGLU, GQA"
    words = card.Card.words | {"ffn_dim": "8/3 D, rounded up to a multiple of 64"}
    rotary = True
    grouped_queries = True
    gated = True
    free_heads = True
    attention_biases = True
    eps, ties = 1e-5, False
    """Defaults of `norm_eps` and `tie_embeddings`."""

    def defaults(self) -> dict[str, Any]:
        """Sets F to 8/3 D, rounded up to a multiple of 64."""
        return {
            "kv_heads": self.model.heads,
            "ffn_dim": round_up(-(-8 * self.model.dim // 3), 64),
            "tie_embeddings": self.ties,
            "norm_eps": self.eps,
        }

    def table(self) -> dict[str, Shape]:
        V, D = self.model.vocab_size or 0, self.model.dim
        return {"embed.weight": (V, D)} | self.blocks() | under("norm", self.norm(D)) | self.output()

    def norm(self, D: int) -> dict[str, Shape]:
        return unit_rms_norm(D) if self.unit_norms else rms_norm(D)

    def block(self, number: int) -> dict[str, Shape]:
        norm = self.norm(self.model.dim)
        linear = self.model.linear(number)
        attention = delta_work.attention(self.model) if linear else self.attention()
        found = block(norm, attention, self.feed_forward(number), self.post_norm)
        return found | (under("norm1_after", norm) | under("norm2_after", norm) if self.sandwich_norm else {})

    def attention(self) -> dict[str, Shape]:
        biased = self.qkv_biased or self.model.attention_bias
        return attention(self.model, biased, self.out_biased, self.gated_attention)

    def feed_forward(self, number: int) -> dict[str, Shape]:
        return swiglu(self.model.dim, self.model.ffn_dim or 0)
