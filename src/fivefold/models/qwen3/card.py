"""Qwen3 as data: see module.py for the paper. No torch."""

from __future__ import annotations

from fivefold.models import work
from fivefold.models.llama import card as llama
from fivefold.models.operations import Operation, Program, Sizes
from fivefold.models.tables import under
from fivefold.sharding.parts import Shape

NORMS = ("norm_q", "norm_k")


class Card(llama.Card):
    summary = "llama with a norm of each query and key head"
    normed_heads = normed_scores = True
    eps = 1e-6
    regional = tuple(f"attention.{norm}.weight" for norm in NORMS)

    def attention(self) -> dict[str, Shape]:
        found = super().attention()
        for norm in NORMS:
            found |= under(norm, self.norm(self.model.head_width))
        return found

    def attention_operations(self, s: Sizes, program: Program, number: int) -> list[Operation]:
        heads = (s.qkv + s.q) / 2 / s.model.head_width  # of queries and keys
        return work.query_key_norms(s, program, super().attention_operations(s, program, number), heads)
