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
from fivefold.models.cache import Cache, LayerCache, cached_attention
from fivefold.models.layers import AddRMSNorm, Embedding, Linear, RMSNorm, logits_or_loss, rope_table
from fivefold.recipe.schema import ModelSection


class Attention(nn.Module):
    """Causal self-attention. Rows of `qkv.weight`: H query heads, then K key heads, then K value heads."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.heads, self.kv_heads = model.heads, model.kv_heads or model.heads
        head_dim = model.dim // model.heads
        self.qkv = Linear(model.dim, (self.heads + 2 * self.kv_heads) * head_dim, bias=False)
        self.out = Linear(self.heads * head_dim, model.dim, bias=False)

    def forward(
        self, x_BTD: Tensor, cos_Td: Tensor, sin_Td: Tensor, cache: LayerCache | None = None
    ) -> Tensor:
        qkv = self.qkv(x_BTD)  # (B, T, (H + 2K) d)
        if cache is None:
            return self.out(
                kernels.qkv_attention(qkv, self.heads, self.kv_heads, cos_Td, sin_Td, causal=True)
            )
        return self.out(cached_attention(qkv, self.heads, self.kv_heads, cos_Td, sin_Td, cache))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). Rows of `gate_up.weight`: F of the gate, then F of up."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        assert model.ffn_dim is not None, "a resolved recipe has ffn_dim"
        self.gate_up = Linear(model.dim, 2 * model.ffn_dim, bias=False)
        self.down = Linear(model.ffn_dim, model.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(kernels.swiglu(self.gate_up(x_BTD)))


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


class Llama(nn.Module):
    """Decoder language model. `head` is None where the output layer shares the embedding's weight."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        assert model.vocab_size is not None, "a resolved recipe has vocab_size"
        assert model.norm_eps is not None, "a resolved recipe has norm_eps"
        self.head_dim, self.rope_theta = model.dim // model.heads, model.rope_theta
        self.dropout = model.dropout
        self.embed = Embedding(model.vocab_size, model.dim)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm = RMSNorm(model.dim, model.norm_eps)
        self.head = None if model.tie_embeddings else Linear(model.dim, model.vocab_size, bias=False)

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Tokens (B, T) -> logits (B, T, V), fp32; with targets (B, T) -> mean loss over targets but -100.

        With a cache the tokens follow those it holds, and only the last position's logits come back,
        (B, 1, V): all that sampling needs.
        """
        start = 0 if cache is None else cache.length
        stop = start + tokens_BT.shape[1]
        cos_Td, sin_Td = rope_table(start, stop, self.head_dim, self.rope_theta, tokens_BT.device)
        x_BTD = F.dropout(self.embed(tokens_BT), self.dropout, self.training)
        for index, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, cos_Td, sin_Td, None if cache is None else cache[index])
        x_BTD = self.norm(x_BTD if cache is None else x_BTD[:, -1:])
        return logits_or_loss(x_BTD, (self.head or self.embed).weight, targets_BT)
