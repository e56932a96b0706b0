"""Llama: a pre-norm decoder with RMSNorm, rotary positions, grouped-query attention and SwiGLU.

Papers: Llama (arXiv 2302.13971), rotary embedding (2104.09864, in the half-split form that Hugging Face
uses), grouped-query attention (2305.13245), SwiGLU (2002.05202).

Shapes: B batch, T tokens, D model width, d width of a head, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from fivefold.kernels.blockwise_attention import Documents
from fivefold.models.base import LanguageModel, PreNormBlock, block_dict
from fivefold.models.layers import (
    AddNorm,
    AddRMSNorm,
    Attention,
    Embedding,
    LayerCache,
    Linear,
    RMSNorm,
    Sublayer,
    SwiGLU,
    rope_table,
)
from fivefold.models.section import ModelSection, known


class Block(PreNormBlock):
    attention_type: type[Sublayer] = Attention

    def __init__(self, model: ModelSection, number: int = 0) -> None:
        D, eps = model.dim, known(model.norm_eps)
        attention = self.attention_type(model, model.attention_bias, number)
        mlp = SwiGLU(D, known(model.ffn_dim))
        super().__init__(RMSNorm(D, eps), attention, AddRMSNorm(D, eps), mlp, model.dropout)


class SandwichBlock(PreNormBlock):
    """x + norm1_after(attention(norm1(x))), then the same with the feed-forward layer (Gemma 2, arXiv 2408.00118)."""

    attention_type: type[Attention] = Attention
    mlp_type: type[SwiGLU] = SwiGLU
    norm_types: tuple[type[RMSNorm], type[AddNorm]] = (RMSNorm, AddRMSNorm)

    def __init__(self, model: ModelSection, number: int = 0) -> None:
        size, (norm, add_norm) = (model.dim, known(model.norm_eps)), self.norm_types
        attention = self.attention_type(model, model.attention_bias, number)
        mlp = self.mlp_type(model.dim, known(model.ffn_dim))
        super().__init__(norm(*size), attention, add_norm(*size), mlp, model.dropout)
        self.norm1_after, self.norm2_after = norm(*size), norm(*size)

    def forward(
        self,
        x_BTD: Tensor,
        *tables: Tensor,
        cache: LayerCache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        attended_BTD = self.attention(self.norm1(x_BTD), *tables, cache=cache, documents=documents)
        attended_BTD = F.dropout(self.norm1_after(attended_BTD), self.dropout, self.training)
        x_BTD, normed_BTD = self.norm2(x_BTD, attended_BTD)
        return x_BTD + F.dropout(self.norm2_after(self.mlp(normed_BTD)), self.dropout, self.training)


class Model(LanguageModel):
    """Decoder language model. `head` is None if the output layer shares the embedding's weight."""

    block_type: type[nn.Module] = Block
    norm_type: type[RMSNorm] = RMSNorm
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
        self.norm = self.norm_type(model.dim, known(model.norm_eps))
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
        """`end` behind the norm."""
        return self.output(y_BTD, (self.head or self.embed).weight, targets_BT)
