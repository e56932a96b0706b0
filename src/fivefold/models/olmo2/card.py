"""OLMo 2 as data: see module.py for the paper. No torch."""

from __future__ import annotations

from fivefold.models import work
from fivefold.models.llama import card as llama
from fivefold.models.operations import Operation, Program, Sizes
from fivefold.models.section import ModelSection
from fivefold.models.tables import rms_norm, under
from fivefold.sharding.parts import Cut, Shape
from fivefold.sharding.units import SQUARES


class Card(llama.Card):
    summary = "llama with norms of the sublayers' outputs, and of queries and keys"
    post_norm = normed_scores = True

    def attention(self) -> dict[str, Shape]:
        return super().attention() | under("norm_qk", rms_norm(sum(normed(self.model))))

    def cut(self, name: str, shape: Shape) -> Cut | None:
        if name == "attention.norm_qk.weight":
            return Cut("column", 0, normed(self.model))
        return super().cut(name, shape)

    def block_operations(self, s: Sizes, program: Program, number: int = 0) -> list[Operation]:
        mlp = work.feed_forward(s, program, self.gated, self.biased)
        return work.post_norm_block(s, program, self.attention_operations(s, program, number), mlp)

    def attention_operations(self, s: Sizes, program: Program, number: int) -> list[Operation]:
        attended = super().attention_operations(s, program, number)
        return work.query_key_norms(s, program, attended, len(normed(self.model)), SQUARES)


def normed(model: ModelSection) -> tuple[int, int]:
    """Features of a token's queries and of its keys."""
    d, H, K = model.head_width, model.heads, model.kv_heads or model.heads
    return d * H, d * K
