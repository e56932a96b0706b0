"""OLMo 2: Llama with RMSNorms of the sublayers' outputs instead of their inputs, and of queries and keys before the
rotation, each over all heads (arXiv 2501.00656).

Shapes: B batch, T tokens, D model width, H query heads, K key heads, d width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fivefold.models.layers import Attention, RMSNorm, SwiGLU, WideRMSNorm
from fivefold.models.llama import module as llama
from fivefold.models.olmo2.card import normed
from fivefold.models.section import ModelSection, known


class NormedAttention(Attention):
    """One norm over all query features (H d), one over all key features (K d)."""

    def __init__(self, model: ModelSection, bias: bool, number: int = 0) -> None:
        super().__init__(model, bias, number)
        self.norm_qk = WideRMSNorm(normed(model), known(model.norm_eps))

    def prepare(self, qkv: Tensor) -> Tensor:
        heads, kv_heads = self.core.heads, self.core.kv_heads
        d = qkv.shape[-1] // (heads + 2 * kv_heads)
        q, k, v = qkv.split([heads * d, kv_heads * d, kv_heads * d], dim=-1)
        return torch.cat((*self.norm_qk(q, k), v), dim=-1)


class Block(nn.Module):
    def __init__(self, model: ModelSection, number: int = 0) -> None:
        super().__init__()
        self.dropout = model.dropout
        self.attention = NormedAttention(model, model.attention_bias, number)
        self.norm1 = RMSNorm(model.dim, known(model.norm_eps))
        self.mlp = SwiGLU(model.dim, known(model.ffn_dim))
        self.norm2 = RMSNorm(model.dim, known(model.norm_eps))

    def forward(self, x_BTD: Tensor, *tables: Tensor, **options: Any) -> Tensor:
        attended_BTD = self.norm1(self.attention(x_BTD, *tables, **options))
        x_BTD = x_BTD + F.dropout(attended_BTD, self.dropout, self.training)
        return x_BTD + F.dropout(self.norm2(self.mlp(x_BTD)), self.dropout, self.training)


class Model(llama.Model):
    """Llama with OLMo 2's blocks."""

    block_type = Block
