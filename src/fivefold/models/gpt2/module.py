"""GPT-2: a pre-norm decoder with LayerNorm, learned positions, tanh-GELU and biases.

Paper: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".

Shapes: B batch, T tokens, D model width, H heads, d = D/H width of a head, F feed-forward width, V
vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from fivefold.models.base import LanguageModel, block_dict
from fivefold.models.cache import LayerCache, cached_attention
from fivefold.models.layers import AttentionCore, Embedding, Linear, Positions, Sublayer
from fivefold.models.section import ModelSection


class Attention(Sublayer):
    """Causal self-attention. Rows of `qkv.weight`: H query heads, then H key heads, then H value heads."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.qkv = Linear(model.dim, 3 * model.dim)
        self.core = AttentionCore(model.heads, model.heads)
        self.out = Linear(model.dim, model.dim)

    def forward(self, x_BTD: Tensor, cache: LayerCache | None = None) -> Tensor:
        qkv = self.qkv(x_BTD)  # (B, T, 3 H d)
        if cache is None:
            return self.finish(qkv)
        return self.out(cached_attention(qkv, self.core.heads, self.core.kv_heads, None, None, cache))

    def finish(self, product: Tensor, *tables: Tensor) -> Tensor:
        """Queries, keys and values (B, T, 3 H d) -> (B, T, D)."""
        return self.out(self.core(product))


class FeedForward(Sublayer):
    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        assert model.ffn_dim is not None, "a resolved recipe has ffn_dim"
        self.up = Linear(model.dim, model.ffn_dim)
        self.down = Linear(model.ffn_dim, model.dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.finish(self.up(x_BTD))

    def finish(self, product: Tensor, *tables: Tensor) -> Tensor:
        """(B, T, F) -> (B, T, D)."""
        return self.down(F.gelu(product, approximate="tanh"))


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


class Model(LanguageModel):
    """Decoder language model. `head` is None if the output layer shares the embedding's weight."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        assert model.vocab_size is not None, "a resolved recipe has vocab_size"
        assert model.norm_eps is not None, "a resolved recipe has norm_eps"
        self.dropout = model.dropout
        self.embed = Embedding(model.vocab_size, model.dim)
        self.embed_positions = Positions(model.seq_len, model.dim)
        self.blocks = block_dict([Block(model) for _ in range(model.layers)])
        self.norm = nn.LayerNorm(model.dim, model.norm_eps)
        self.head = None if model.tie_embeddings else Linear(model.dim, model.vocab_size, bias=False)

    def begin(self, tokens_BT: Tensor, positions_T: Tensor) -> Tensor:
        """Embeds tokens. T must not exceed the recipe's `seq_len`: only these positions are learned."""
        x_BTD = self.embed(tokens_BT) + self.embed_positions(positions_T)
        return F.dropout(x_BTD, self.dropout, self.training)

    def end(self, x_BTD: Tensor, targets_BT: Tensor | None) -> Tensor:
        return self.output(self.norm(x_BTD), (self.head or self.embed).weight, targets_BT)
