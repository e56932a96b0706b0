"""The fifth architecture as data."""

from __future__ import annotations

from typing import Any

from fivefold.models import card, work
from fivefold.models.operations import Operation, Program, Sizes
from fivefold.models.tables import attention, rms_norm, swiglu, under
from fivefold.sharding.parts import Shape


class Card(card.Card):
    summary = "llama without rotary positions, one norm per block"
    gated = True
    regional = ("attention.norm_q.weight",)

    def defaults(self) -> dict[str, Any]:
        D = self.model.dim
        return {"kv_heads": self.model.heads, "ffn_dim": 2 * D, "tie_embeddings": True, "norm_eps": 1e-5}

    def table(self) -> dict[str, Shape]:
        V, D, T = self.model.vocab_size or 0, self.model.dim, self.model.seq_len
        embeddings: dict[str, Shape] = {"embed.weight": (V, D), "embed_positions.weight": (T, D)}
        return embeddings | self.blocks() | under("norm", rms_norm(D)) | self.output()

    def block(self, number: int) -> dict[str, Shape]:
        D, F = self.model.dim, self.model.ffn_dim or 0
        return (
            under("norm1", rms_norm(D))
            | under("attention", attention(self.model, bias=False))
            | under("attention.norm_q", rms_norm(self.model.head_width))
            | under("mlp", swiglu(D, F))
        )

    def block_operations(self, s: Sizes, program: Program, mixed: bool = False) -> list[Operation]:
        return [
            work.norm("norm1", s, program, "input"),
            *work.attention(s, program, self.causal, self.rotary, self.biased),
            *work.feed_forward(s, program, self.gated, self.biased),
            work.add("add", s, program, 0.0),
        ]
