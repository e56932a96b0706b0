"""Qwen3-Next as data: see module.py for the papers. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fivefold.models.card import Contradiction
from fivefold.models.qwen3 import card as qwen3
from fivefold.models.qwen3_moe import card as qwen3_moe
from fivefold.sharding.layout import divisors


class Card(qwen3_moe.Card):
    summary = (
        "qwen3_moe with linear attention in most blocks, gated attention in the others, a gated shared expert"
    )
    words = qwen3_moe.Card.words | {
        "linear_heads": "2 `linear_key_heads`",
        "linear_key_heads": "`heads`",
        "linear_key_dim": "D / H",
        "linear_value_dim": "D / H",
    }
    widths = (*qwen3_moe.Card.widths, "linear_heads", "linear_key_heads")
    attention_biases = False
    patterned = linear_attention = partly_rotated = gated_attention = gated_shared = unit_norms = True
    regional = (
        *(f"attention.{norm}.delta" for norm in qwen3.NORMS), "attention.norm.weight", "mlp.shared_gate_vectors"
    )  # fmt: skip
    shared = 1

    def defaults(self) -> dict[str, Any]:
        heads, width = self.model.heads, max(1, self.model.dim // self.model.heads)
        return super().defaults() | {
            "linear_heads": 2 * (self.model.linear_key_heads or heads),
            "linear_key_heads": heads,
            "linear_key_dim": width,
            "linear_value_dim": width,
        }

    def rules(self) -> Iterator[Contradiction]:
        yield from super().rules()
        model, unset = self.model, self.defaults()
        heads = model.linear_heads or unset["linear_heads"]
        key_heads = model.linear_key_heads or unset["linear_key_heads"]
        if heads % key_heads:
            nearest = min(divisors(heads), key=lambda n: abs(n - key_heads))
            yield (
                {"model.linear_key_heads", "model.linear_heads"},
                f"model.linear_key_heads = {key_heads} must divide model.linear_heads = {heads}. "
                f"Nearest valid: linear_key_heads = {nearest}",
            )
