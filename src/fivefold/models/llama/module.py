"""Llama: a pre-norm decoder with RMSNorm, rotary positions, grouped-query attention and SwiGLU.

Papers: Llama (arXiv 2302.13971), rotary embedding (2104.09864, in the half-split form that Hugging Face
uses), grouped-query attention (2305.13245), SwiGLU (2002.05202).

Shapes: B batch, T tokens, D model width, d width of a head, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from fivefold.models.base import LanguageModel, PreNormBlock, block_dict
from fivefold.models.card import card_of
from fivefold.models.layers import (
    AddNorm,
    AddRMSNorm,
    AddUnitRMSNorm,
    Attention,
    Embedding,
    Linear,
    RMSNorm,
    Sublayer,
    SwiGLU,
    UnitRMSNorm,
    rope_table,
)
from fivefold.models.section import ModelSection, known


def norms_of(model: ModelSection) -> tuple[type[RMSNorm], type[AddNorm]]:
    """A norm, and one that adds first, with scales as the card says."""
    return (UnitRMSNorm, AddUnitRMSNorm) if card_of(model).unit_norms else (RMSNorm, AddRMSNorm)


class Block(PreNormBlock):
    attention_type: type[Sublayer] = Attention
    mlp_type: type[SwiGLU] = SwiGLU

    def __init__(self, model: ModelSection, number: int = 0) -> None:
        size, (norm, add_norm) = (model.dim, known(model.norm_eps)), norms_of(model)
        attention = self.attention_type(model, model.attention_bias, number)
        mlp = self.mlp_type(model.dim, known(model.ffn_dim))
        super().__init__(norm(*size), attention, add_norm(*size), mlp, model.dropout)


class SandwichBlock(Block):
    """x + norm1_after(attention(norm1(x))), then the same with the feed-forward layer (Gemma 2, arXiv 2408.00118)."""

    def __init__(self, model: ModelSection, number: int = 0) -> None:
        super().__init__(model, number)
        size, (norm, _) = (model.dim, known(model.norm_eps)), norms_of(model)
        self.norm1_after, self.norm2_after = norm(*size), norm(*size)

    def forward(self, x_BTD: Tensor, *tables: Tensor, **options: Any) -> Tensor:
        attended_BTD = self.norm1_after(self.attention(self.norm1(x_BTD), *tables, **options))
        x_BTD, normed_BTD = self.norm2(x_BTD, F.dropout(attended_BTD, self.dropout, self.training))
        return x_BTD + F.dropout(self.norm2_after(self.mlp(normed_BTD)), self.dropout, self.training)


class Model(LanguageModel):
    """Decoder language model. `head` is None if the output layer shares the embedding's weight."""

    block_type: type[nn.Module] = Block
    amplitude = 0.0
    """Of the rotated vectors; 0: that of the model's scaling."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.section, self.local, self.width = model, model.local, model.rotary_width
        self.amplitude = (self.amplitude or model.rope_amplitude) * model.score_amplitude
        self.still = (model.head_width - self.width) // 2 if model.rotary_dim else 0
        """Pairs of features that do not rotate: their angle is 0."""
        self.dropout = model.dropout
        self.output.cap = model.logit_cap
        self.embed = Embedding(known(model.vocab_size), model.dim)
        self.blocks = block_dict([self.block_type(model, number) for number in range(model.blocks)])
        self.norm = norms_of(model)[0](model.dim, known(model.norm_eps))
        self.head = None if model.tie_embeddings else Linear(model.dim, known(model.vocab_size), bias=False)

    def begin(self, tokens_BT: Tensor, positions_T: Tensor) -> Tensor:
        return F.dropout(self.embed(tokens_BT), self.dropout, self.training)

    def context(self, positions_T: Tensor) -> tuple[Tensor, ...]:
        tables = rope_table(positions_T, self.section, self.width, self.amplitude)
        if self.local is not None:
            tables = (*tables, *rope_table(positions_T, self.local, self.width, self.local.score_amplitude))
        if (rest := self.still) == 0:
            return tables
        return tuple(F.pad(table, (0, rest), value=float(i % 2 == 0)) for i, table in enumerate(tables))

    def end(self, x_BTD: Tensor, targets_BT: Tensor | None) -> Tensor:
        return self.predict(self.norm(x_BTD), targets_BT)

    def predict(self, y_BTD: Tensor, targets_BT: Tensor | None) -> Tensor:
        """What `end` computes after its norm."""
        return self.output(y_BTD, (self.head or self.embed).weight, targets_BT)
