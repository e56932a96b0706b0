"""GPT-2: a pre-norm decoder with LayerNorm, learned positions, tanh-GELU and biases.

Paper: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".

Shapes: B batch, T tokens, D model width, H heads, d = D/H width of a head, F feed-forward width, V
vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fivefold import kernels
from fivefold.models.cache import Cache, LayerCache, cached_attention
from fivefold.models.layers import Embedding, Linear, logits_or_loss
from fivefold.recipe.schema import ModelSection


class Attention(nn.Module):
    """Causal self-attention. Rows of `qkv.weight`: H query heads, then H key heads, then H value heads."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.heads = model.heads
        self.qkv = Linear(model.dim, 3 * model.dim)
        self.out = Linear(model.dim, model.dim)

    def forward(self, x_BTD: Tensor, cache: LayerCache | None = None) -> Tensor:
        qkv = self.qkv(x_BTD)  # (B, T, 3 H d)
        if cache is None:
            return self.out(kernels.qkv_attention(qkv, self.heads, self.heads, None, None, causal=True))
        return self.out(cached_attention(qkv, self.heads, self.heads, None, None, cache))


class FeedForward(nn.Module):
    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        assert model.ffn_dim is not None, "a resolved recipe has ffn_dim"
        self.up = Linear(model.dim, model.ffn_dim)
        self.down = Linear(model.ffn_dim, model.dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        assert model.norm_eps is not None, "a resolved recipe has norm_eps"
        self.dropout = model.dropout
        self.norm1 = nn.LayerNorm(model.dim, model.norm_eps)
        self.attention = Attention(model)
        self.norm2 = nn.LayerNorm(model.dim, model.norm_eps)
        self.mlp = FeedForward(model)

    def forward(self, x_BTD: Tensor, cache: LayerCache | None = None) -> Tensor:
        attended_BTD = self.attention(self.norm1(x_BTD), cache)
        x_BTD = x_BTD + F.dropout(attended_BTD, self.dropout, self.training)
        return x_BTD + F.dropout(self.mlp(self.norm2(x_BTD)), self.dropout, self.training)


class GPT2(nn.Module):
    """Decoder language model. `head` is None where the output layer shares the embedding's weight."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        assert model.vocab_size is not None, "a resolved recipe has vocab_size"
        assert model.norm_eps is not None, "a resolved recipe has norm_eps"
        self.dropout = model.dropout
        self.embed = Embedding(model.vocab_size, model.dim)
        self.embed_positions = Embedding(model.seq_len, model.dim)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm = nn.LayerNorm(model.dim, model.norm_eps)
        self.head = None if model.tie_embeddings else Linear(model.dim, model.vocab_size, bias=False)

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Tokens (B, T) -> logits (B, T, V), fp32; with targets (B, T) -> mean loss over targets but -100.

        T may not exceed the recipe's `seq_len`. With a cache the tokens follow those it holds, and only the
        last position's logits come back, (B, 1, V): all that sampling needs.
        """
        start = 0 if cache is None else cache.length
        stop = start + tokens_BT.shape[1]
        assert stop <= self.embed_positions.num_embeddings, (
            f"{stop} tokens, but positions are learned up to seq_len"
        )
        positions_TD = self.embed_positions(torch.arange(start, stop, device=tokens_BT.device))
        x_BTD = F.dropout(self.embed(tokens_BT) + positions_TD, self.dropout, self.training)
        for index, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, None if cache is None else cache[index])
        x_BTD = self.norm(x_BTD if cache is None else x_BTD[:, -1:])
        return logits_or_loss(x_BTD, (self.head or self.embed).weight, targets_BT)
