"""Llama: a pre-norm decoder with RMSNorm, rotary positions, grouped-query attention and SwiGLU.

Papers: Llama (arXiv 2302.13971), rotary embedding (2104.09864, in the half-split form that Hugging Face
uses), grouped-query attention (2305.13245), SwiGLU (2002.05202).

Shapes: B batch, T tokens, D model width, H query heads, K key-value heads, d = D/H width of a head,
F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from fivefold import kernels
from fivefold.models.base import LanguageModel, block_dict
from fivefold.models.cache import LayerCache, cached_attention
from fivefold.models.layers import AddRMSNorm, AttentionCore, Embedding, Linear, RMSNorm, Sublayer, rope_table
from fivefold.models.section import ModelSection


class Attention(Sublayer):
    """Causal self-attention. Rows of `qkv.weight`: H query heads, then K key heads, then K value heads."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        kv_heads, head_dim = model.kv_heads or model.heads, model.dim // model.heads
        self.qkv = Linear(model.dim, (model.heads + 2 * kv_heads) * head_dim, bias=False)
        self.core = AttentionCore(model.heads, kv_heads)
        self.out = Linear(model.heads * head_dim, model.dim, bias=False)

    def forward(
        self, x_BTD: Tensor, cos_Td: Tensor, sin_Td: Tensor, cache: LayerCache | None = None
    ) -> Tensor:
        qkv = self.qkv(x_BTD)  # (B, T, (H + 2K) d)
        if cache is None:
            return self.finish(qkv, cos_Td, sin_Td)
        return self.out(cached_attention(qkv, self.core.heads, self.core.kv_heads, cos_Td, sin_Td, cache))

    def finish(self, product: Tensor, *tables: Tensor) -> Tensor:
        """Queries, keys and values (B, T, (H + 2K) d) -> (B, T, D)."""
        return self.out(self.core(product, *tables))


class FeedForward(Sublayer):
    """SwiGLU: down(silu(gate(x)) * up(x)). Rows of `gate_up.weight`: F of the gate, then F of up."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        assert model.ffn_dim is not None, "a resolved recipe has ffn_dim"
        self.gate_up = Linear(model.dim, 2 * model.ffn_dim, bias=False)
        self.down = Linear(model.ffn_dim, model.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.finish(self.gate_up(x_BTD))

    def finish(self, product: Tensor, *tables: Tensor) -> Tensor:
        """Gate and up (B, T, 2F) -> (B, T, D)."""
        return self.down(kernels.swiglu(product))


class Block(nn.Module):
    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        assert model.norm_eps is not None, "a resolved recipe has norm_eps"
        self.dropout = model.dropout
        self.norm1 = RMSNorm(model.dim, model.norm_eps)
        self.attention = Attention(model)
        self.norm2 = AddRMSNorm(model.dim, model.norm_eps)
        self.mlp = FeedForward(model)

    def forward(
        self, x_BTD: Tensor, cos_Td: Tensor, sin_Td: Tensor, cache: LayerCache | None = None
    ) -> Tensor:
        attended_BTD = self.attention(self.norm1(x_BTD), cos_Td, sin_Td, cache)
        x_BTD, normed_BTD = self.norm2(x_BTD, F.dropout(attended_BTD, self.dropout, self.training))
        return x_BTD + F.dropout(self.mlp(normed_BTD), self.dropout, self.training)


class Model(LanguageModel):
    """Decoder language model. `head` is None if the output layer shares the embedding's weight."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        assert model.vocab_size is not None, "a resolved recipe has vocab_size"
        assert model.norm_eps is not None, "a resolved recipe has norm_eps"
        self.head_dim, self.rope_theta = model.dim // model.heads, model.rope_theta
        self.dropout = model.dropout
        self.embed = Embedding(model.vocab_size, model.dim)
        self.blocks = block_dict([Block(model) for _ in range(model.layers)])
        self.norm = RMSNorm(model.dim, model.norm_eps)
        self.head = None if model.tie_embeddings else Linear(model.dim, model.vocab_size, bias=False)

    def begin(self, tokens_BT: Tensor, positions_T: Tensor) -> Tensor:
        return F.dropout(self.embed(tokens_BT), self.dropout, self.training)

    def context(self, positions_T: Tensor) -> tuple[Tensor, ...]:
        return rope_table(positions_T, self.head_dim, self.rope_theta)

    def end(self, x_BTD: Tensor, targets_BT: Tensor | None) -> Tensor:
        return self.output(self.norm(x_BTD), (self.head or self.embed).weight, targets_BT)
