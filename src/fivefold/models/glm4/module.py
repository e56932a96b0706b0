"""GLM-4 (arXiv 2406.12793), as of 2025: Llama with norms before and behind each sublayer, and heads of which a half
rotates."""

from __future__ import annotations

from fivefold.models.base import SandwichBlock
from fivefold.models.layers import AddRMSNorm, Attention, RMSNorm, SwiGLU
from fivefold.models.llama import module as llama
from fivefold.models.section import ModelSection, known


class BiasedAttention(Attention):
    out_biased = False


class Block(SandwichBlock):
    def __init__(self, model: ModelSection, number: int = 0) -> None:
        size = model.dim, known(model.norm_eps)
        norms = RMSNorm(*size), AddRMSNorm(*size), RMSNorm(*size), RMSNorm(*size)
        attention = BiasedAttention(model, model.attention_bias, number)
        super().__init__(attention, SwiGLU(model.dim, known(model.ffn_dim)), norms, model.dropout)


class Model(llama.Model):
    """Llama with GLM-4's blocks."""

    block_type = Block
