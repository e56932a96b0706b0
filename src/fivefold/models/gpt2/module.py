"""GPT-2: a pre-norm decoder with LayerNorm, learned positions, tanh-GELU and biases.

Paper: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".

Shapes: B batch, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from fivefold.models.base import LanguageModel, PreNormBlock, block_dict
from fivefold.models.layers import GELU, AddLayerNorm, Attention, Embedding, LayerNorm, Linear, Positions
from fivefold.models.section import ModelSection, known


class Block(PreNormBlock):
    def __init__(self, model: ModelSection) -> None:
        D, eps = model.dim, known(model.norm_eps)
        mlp = GELU(D, known(model.ffn_dim), approximate="tanh")
        super().__init__(
            LayerNorm(D, eps), Attention(model, bias=True), AddLayerNorm(D, eps), mlp, model.dropout
        )


class Model(LanguageModel):
    """Decoder language model. `head` is None if the output layer shares the embedding's weight."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.dropout = model.dropout
        self.embed = Embedding(known(model.vocab_size), model.dim)
        self.embed_positions = Positions(model.seq_len, model.dim)
        self.blocks = block_dict([Block(model) for _ in range(model.layers)])
        self.norm = LayerNorm(model.dim, known(model.norm_eps))
        self.head = None if model.tie_embeddings else Linear(model.dim, known(model.vocab_size), bias=False)

    def begin(self, tokens_BT: Tensor, positions_T: Tensor) -> Tensor:
        """Embeds tokens. T must not exceed the recipe's `seq_len`: only these positions are learned."""
        x_BTD = self.embed(tokens_BT) + self.embed_positions(positions_T)
        return F.dropout(x_BTD, self.dropout, self.training)

    def end(self, x_BTD: Tensor, targets_BT: Tensor | None) -> Tensor:
        return self.output(self.norm(x_BTD), (self.head or self.embed).weight, targets_BT)
