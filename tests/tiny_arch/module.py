"""The fifth architecture as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fivefold.kernels.blockwise_attention import Documents
from fivefold.models.base import LanguageModel, block_dict
from fivefold.models.layers import Attention, Embedding, LayerCache, Linear, Positions, RMSNorm, SwiGLU
from fivefold.models.section import ModelSection


class NormedAttention(Attention):
    """With a norm of each query head."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__(model, bias=False)
        self.norm_q = RMSNorm(model.head_width, model.norm_eps or 0.0)

    def prepare(self, qkv: Tensor) -> Tensor:
        heads, others = self.core.heads, 2 * self.core.kv_heads
        q, kv = qkv.unflatten(-1, (heads + others, -1)).split([heads, others], dim=-2)
        return torch.cat((self.norm_q(q), kv), dim=-2).flatten(-2)


class Block(nn.Module):
    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.norm1 = RMSNorm(model.dim, model.norm_eps or 0.0)
        self.attention = NormedAttention(model)
        self.mlp = SwiGLU(model.dim, model.ffn_dim or 0)

    def forward(
        self, x_BTD: Tensor, cache: LayerCache | None = None, documents: Documents | None = None
    ) -> Tensor:
        normed_BTD = self.norm1(x_BTD)
        return x_BTD + self.attention(normed_BTD, cache=cache, documents=documents) + self.mlp(normed_BTD)


class Model(LanguageModel):
    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        assert model.vocab_size is not None
        self.embed = Embedding(model.vocab_size, model.dim)
        self.embed_positions = Positions(model.seq_len, model.dim)
        self.blocks = block_dict([Block(model) for _ in range(model.layers)])
        self.norm = RMSNorm(model.dim, model.norm_eps or 0.0)
        self.head = None if model.tie_embeddings else Linear(model.dim, model.vocab_size, bias=False)

    def begin(self, tokens_BT: Tensor, positions_T: Tensor) -> Tensor:
        return self.embed(tokens_BT) + self.embed_positions(positions_T)

    def end(self, x_BTD: Tensor, targets_BT: Tensor | None) -> Tensor:
        return self.output(self.norm(x_BTD), (self.head or self.embed).weight, targets_BT)
