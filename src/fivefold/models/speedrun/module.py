"""Techniques of the runs that train GPT-2 to a stated loss in the fewest minutes (K. Jordan and others,
github.com/KellerJordan/modded-nanogpt, 2024 to 2026), each an option.

- **Squared ReLU** (Primer, arXiv 2109.08668) in place of SwiGLU, with 4 D features: the same FLOPs.
- **Value embeddings**: a token adds a vector of its own, read from a table, to its values. (Modded-nanogpt's record of
  November 2024; value residual learning, arXiv 2410.17897, is near it.) The blocks' tables are columns of one, which
  tensor parallelism divides by heads.
- **Skips**: the block that is n-th from the end begins with the output of the n-th block, times a learned factor per
  feature, added to its input (as in U-Net, arXiv 1505.04597).

The norms of query and key heads are Qwen3's. A block needs tokens and what other blocks computed, so there is no
pipeline.

Shapes: B batch, T tokens, D model, K key-value heads, d width of a head, F feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fivefold.models.base import PreNormBlock, block_dict
from fivefold.models.layers import AddRMSNorm, Embedding, Linear, RMSNorm, Sublayer, SwiGLU
from fivefold.models.qwen3 import module as qwen3
from fivefold.models.section import ModelSection, known
from fivefold.models.speedrun.card import takes_skip, values_width


class SquaredReLU(Sublayer):
    """down(relu(up(x)) ** 2)."""

    entry = "up"

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.up = Linear(dim, width, bias=False)
        self.down = Linear(width, dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.finish(self.up(x_BTD))

    def finish(self, product: Tensor, *tables: Tensor) -> Tensor:
        """(B, T, F) -> (B, T, D)."""
        if torch.compiler.is_compiling():
            return self.down(F.relu(product).square())
        return self.down(_Squared.apply(product))


class _Squared(Function):
    """relu(x) ** 2, which keeps its input only, and has one tensor beside it in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.relu(x).square_()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return F.relu(ctx.saved_tensors[0]).mul_(grads[0]).mul_(2.0)


class Attention(qwen3.NormedAttention):
    """tables: cosine and sine, and in blocks that have them the tokens' own values (B, T, K d)."""

    def angles(self, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tables[:2]

    def added_values(self, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tables[2:]


class Block(PreNormBlock):
    def __init__(self, model: ModelSection, number: int) -> None:
        D, eps, F = model.dim, known(model.norm_eps), known(model.ffn_dim)
        mlp = SquaredReLU(D, F) if model.squared_relu else SwiGLU(D, F)
        attention = Attention(model, model.attention_bias, number)
        super().__init__(RMSNorm(D, eps), attention, AddRMSNorm(D, eps), mlp, model.dropout)
        self.skip = nn.Parameter(torch.ones(D)) if takes_skip(model, number) else None

    def forward(
        self, x_BTD: Tensor, *tables: Tensor, skip_BTD: Tensor | None = None, **options: Any
    ) -> Tensor:
        """skip_BTD: another block's output."""
        if self.skip is not None and skip_BTD is not None:
            x_BTD = torch.addcmul(x_BTD, skip_BTD, self.skip)
        return super().forward(x_BTD, *tables, **options)


class Model(qwen3.Model):
    def __init__(self, model: ModelSection) -> None:
        super().__init__(model)
        self.blocks = block_dict([Block(model, number) for number in range(model.layers)])
        width = model.layers * values_width(model)
        self.embed_values = Embedding(known(model.vocab_size), width) if model.value_embeddings else None
        # The last: FSDP2 holds the last gradient for longer, so it is small
        self.norm = self._modules.pop("norm")

    def besides(
        self, block: Any, x_BTD: Tensor, tokens_BT: Tensor
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        skip = {} if block.skip is None else {"skip_BTD": torch.empty_like(x_BTD, requires_grad=True)}
        if self.embed_values is None:
            return (), skip
        width = self.embed_values.weight.shape[1] // len(self.blocks)
        return (x_BTD.new_empty(*tokens_BT.shape, width, requires_grad=True),), skip

    def through(
        self,
        x_BTD: Tensor,
        tokens_BT: Tensor,
        context: tuple[Tensor, ...],
        options: Callable[[int], Mapping[str, Any]],
    ) -> Tensor:
        layers, outputs = len(self.blocks), list[Tensor]()
        values = [()] * layers
        if self.embed_values is not None:
            values = [(values_BTv,) for values_BTv in self.embed_values(tokens_BT).chunk(layers, -1)]
        for number, block in enumerate(self.blocks.values()):
            skip = {} if block.skip is None else {"skip_BTD": outputs[layers - 1 - number]}
            x_BTD = block(x_BTD, *context, *values[number], **skip, **options(number))
            outputs.append(x_BTD)
        return x_BTD
