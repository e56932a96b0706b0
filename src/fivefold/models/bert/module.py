"""BERT: a post-norm encoder in which every token sees every other, trained on masked tokens (arXiv 1810.04805).

Sequences are packed, so there is no padding; all tokens have type 0. GELU is exact (erf).

Shapes: B batch, T tokens, D model width, V vocabulary, M masked tokens of the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fivefold.kernels import elementwise
from fivefold.kernels.blockwise_attention import Documents
from fivefold.models.base import LanguageModel, block_dict
from fivefold.models.bert.card import TOKEN_TYPES
from fivefold.models.layers import GELU, AddLayerNorm, Attention, Embedding, LayerNorm, Linear, Positions
from fivefold.models.section import ModelSection, known


class Block(nn.Module):
    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.dropout = model.dropout
        self.attention = Attention(model, bias=True, causal=False)
        self.norm1 = AddLayerNorm(model.dim, known(model.norm_eps))
        self.mlp = GELU(model.dim, known(model.ffn_dim), approximate="none")
        self.norm2 = AddLayerNorm(model.dim, known(model.norm_eps))

    def forward(self, x_BTD: Tensor, documents: Documents | None = None) -> Tensor:
        attended_BTD = self.attention(x_BTD, documents=documents)
        _, x_BTD = self.norm1(x_BTD, F.dropout(attended_BTD, self.dropout, self.training))
        return self.norm2(x_BTD, F.dropout(self.mlp(x_BTD), self.dropout, self.training))[1]


class MaskedOnly(nn.Module):
    """Selects the M masked tokens: hidden states (B, T, D) and targets (B, T) -> (1, M, D) and (1, M). No parameters.
    Sequence parallelism gathers the sequence before it."""

    def forward(self, x_BTD: Tensor, targets_BT: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if targets_BT is None:
            return x_BTD, None
        # Their number is a shape. On a GPU the host waits for it: here, and nowhere else in forward or backward.
        masked_M = (targets_BT != -100).flatten().nonzero().squeeze(1)
        targets_M = targets_BT.flatten().index_select(0, masked_M)
        return x_BTD.flatten(0, 1).index_select(0, masked_M).unsqueeze(0), targets_M.unsqueeze(0)


class Model(LanguageModel):
    """Encoder with the masked-language-model head: `transform`, GELU, `norm`, output layer with `head_bias`.

    `head` is None if the output layer shares the embedding's weight.
    """

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.dropout = model.dropout
        self.embed = Embedding(known(model.vocab_size), model.dim)
        self.embed_positions = Positions(model.seq_len, model.dim)
        self.embed_types = Embedding(TOKEN_TYPES, model.dim)
        self.embed_norm = LayerNorm(model.dim, known(model.norm_eps))
        self.blocks = block_dict([Block(model) for _ in range(model.layers)])
        self.select: nn.Module = MaskedOnly()
        self.transform = Linear(model.dim, model.dim)
        self.norm = LayerNorm(model.dim, known(model.norm_eps))
        self.head = None if model.tie_embeddings else Linear(model.dim, known(model.vocab_size), bias=False)
        self.head_bias = nn.Parameter(torch.zeros(known(model.vocab_size)))

    def begin(self, tokens_BT: Tensor, positions_T: Tensor) -> Tensor:
        """Embeds tokens. T must not exceed the recipe's `seq_len`: only these positions are learned."""
        x_BTD = self.embed(tokens_BT) + (self.embed_positions(positions_T) + self.embed_types.weight[0])
        return F.dropout(self.embed_norm(x_BTD), self.dropout, self.training)

    def end(self, x_BTD: Tensor, targets_BT: Tensor | None) -> Tensor:
        """Computes logits or loss. With targets, the head works on the M masked tokens only."""
        x_BTD, targets_BT = self.select(x_BTD, targets_BT)
        x_BTD = self.norm(elementwise.gelu(self.transform(x_BTD), "none"))
        return self.output(x_BTD, (self.head or self.embed).weight, targets_BT, self.head_bias)
