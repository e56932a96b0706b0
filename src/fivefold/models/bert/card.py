"""BERT as data: see module.py for the paper. No torch."""

from __future__ import annotations

from typing import Any

from fivefold.models import card
from fivefold.models.card import attention, block, gelu, layer_norm, linear, under
from fivefold.sharding.parts import Shape

TOKEN_TYPES = 2  # sentence A and B of the original; only A (0) is used, but both are kept for weight exchange


class Card(card.Card):
    summary = "bidirectional encoder, masked-language-model loss"
    words = card.Card.words | {"ffn_dim": "4 D"}
    objective = "mlm"
    causal = False
    biased = True
    whole_sequences = ("select.", "transform.", "norm.")  # masked tokens are spread unevenly over the pieces

    def defaults(self) -> dict[str, Any]:
        model = self.model
        return {
            "kv_heads": model.heads,
            "ffn_dim": 4 * model.dim,
            "tie_embeddings": True,
            "norm_eps": 1e-12,
        }

    def table(self) -> dict[str, Shape]:
        V, D, T = self.model.vocab_size or 0, self.model.dim, self.model.seq_len
        embeddings: dict[str, Shape] = {
            "head_bias": (V,),  # the module's own parameter comes before those of its parts
            "embed.weight": (V, D),
            "embed_positions.weight": (T, D),
            "embed_types.weight": (TOKEN_TYPES, D),
        }
        head = linear("transform", D, D, bias=True) | under("norm", layer_norm(D)) | self.output()
        return embeddings | under("embed_norm", layer_norm(D)) | self.blocks() | head

    def block(self, number: int) -> dict[str, Shape]:
        D, F = self.model.dim, self.model.ffn_dim or 0
        return block(layer_norm(D), attention(self.model, bias=True), gelu(D, F), post_norm=True)
