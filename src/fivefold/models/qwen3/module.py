"""Qwen3: Llama with an RMSNorm of each query head and each key head before the rotation (arXiv 2505.09388).

Shapes: B batch, T tokens, H query heads, K key heads, d width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.models.layers import Attention
from fivefold.models.llama import module as llama
from fivefold.models.section import ModelSection, known


class NormedAttention(Attention):
    """One norm (d) for all query heads, one for all key heads."""

    def __init__(self, model: ModelSection, bias: bool, number: int = 0) -> None:
        super().__init__(model, bias, number)
        size, (norm, _) = (model.head_width, known(model.norm_eps)), llama.norms_of(model)
        self.norm_q, self.norm_k = norm(*size), norm(*size)

    def prepare(self, qkv: Tensor, values_BTv: Tensor | None = None) -> Tensor:
        """values_BTv: a value embedding (`Attention.added_values`)."""
        heads, kv_heads = self.core.heads, self.core.kv_heads
        each_BTNd = qkv.unflatten(-1, (heads + 2 * kv_heads, -1))
        q_BTHd, k_BTKd, v_BTKd = each_BTNd.split([heads, kv_heads, kv_heads], dim=-2)
        v_BTKd = v_BTKd if values_BTv is None else v_BTKd + values_BTv.view_as(v_BTKd)
        return torch.cat((self.norm_q(q_BTHd), self.norm_k(k_BTKd), v_BTKd), dim=-2).flatten(-2)


class Block(llama.Block):
    attention_type = NormedAttention


class Model(llama.Model):
    """Llama with `NormedAttention`."""

    block_type = Block
