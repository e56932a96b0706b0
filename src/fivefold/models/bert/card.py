"""BERT as data: see module.py for the paper. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.models.gpt2 import card as gpt2
from fivefold.models.operations import Operation, Program, Sizes
from fivefold.models.tables import layer_norm, linear, under
from fivefold.sharding.parts import Shape

TOKEN_TYPES = 2  # sentence A and B of the original; only A (0) is used, but both are kept for weight exchange


class Card(gpt2.Card):
    summary = "bidirectional encoder, masked-language-model loss"
    objective = "mlm"
    causal = False
    post_norm = True
    whole_sequences = ("select.", "transform.", "norm.")  # masked tokens are spread unevenly over the pieces

    def defaults(self) -> dict[str, Any]:
        return super().defaults() | {"norm_eps": 1e-12}

    def block_operations(self, s: Sizes, program: Program, number: int = 0) -> list[Operation]:
        """As many as GPT-2's, which move and keep as much. Recomputation leaves norms behind sublayers alone."""
        ops = super().block_operations(s, program, number)
        norms = {op: (op.saved[0], replace(op.saved[1], role="stream")) for op in ops if op.part == "norm"}
        return [replace(op, part="", saved=norms[op]) if op in norms else op for op in ops]

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
