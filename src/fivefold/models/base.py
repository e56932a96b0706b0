"""The base of all language models: a beginning, a stack of blocks, an end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fivefold.models.layers import AddNorm, Output

if TYPE_CHECKING:
    from fivefold.kernels.blockwise_attention import Documents
    from fivefold.models.layers import Cache, LayerCache


class LanguageModel(nn.Module, ABC):
    """A language model, or a run of its blocks.

    `begin`, `context`, each of `blocks`, and `end` are called in this order. A part of a model (a pipeline stage) is
    the same module with only some of `blocks`. Its `first` or `last` is False if it lacks the beginning or the end.
    Parameters keep the names that they have in the whole. `blocks` is keyed by the block's number as text.
    """

    blocks: nn.ModuleDict

    def __init__(self) -> None:
        super().__init__()
        self.first = self.last = True
        self.output = Output()

    @abstractmethod
    def begin(self, tokens_BT: Tensor, positions_T: Tensor) -> Tensor:
        """Embeds tokens at these positions, (T) or (B, T): (B, T, D)."""

    def context(self, positions_T: Tensor) -> tuple[Tensor, ...]:
        """Arguments of every block besides x, such as the rotary table."""
        return ()

    @abstractmethod
    def end(self, x_BTD: Tensor, targets_BT: Tensor | None) -> Tensor:
        """(B, T, D) -> logits (B, T, V) in fp32; with targets -> mean loss over targets other than -100."""

    def forward(
        self,
        inputs: Tensor,
        targets_BT: Tensor | None = None,
        cache: Cache | None = None,
        positions_T: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Tokens (B, T) -> logits (B, T, V), fp32; with targets (B, T) -> mean loss over targets other than -100.

        inputs: tokens, or (B, T, D) from the previous blocks if the model has no beginning. cache: the tokens follow
        those in the cache. Without targets only the logits of the last position are returned, (B, 1, V), which sampling
        needs.
        positions_T: the tokens' positions in their sequence; None: 0, 1, 2, ... after the cache. documents: those in
        the sequences. Attention does not cross them, and learned positions begin anew in each. (Rotary ones need not:
        attention sees their differences only.)
        """
        if positions_T is None:
            start = 0 if cache is None else cache.length
            positions_T = torch.arange(start, start + inputs.shape[1], device=inputs.device)
        x_BTD = inputs
        if self.first:
            x_BTD = self.begin(inputs, documents.positions(positions_T) if documents else positions_T)
        context = self.context(positions_T)
        apart = {} if documents is None else {"documents": documents}
        for number, block in self.blocks.items():
            cached = {} if cache is None else {"cache": cache[int(number)]}
            x_BTD = block(x_BTD, *context, **cached, **apart)
        if not self.last:
            return x_BTD
        if cache is not None and targets_BT is None:
            x_BTD = x_BTD[:, -1:]
        return self.end(x_BTD, targets_BT)


class PreNormBlock(nn.Module):
    """x + attention(norm1(x)), then the same with the feed-forward layer. norm2 adds first, in one pass over memory."""

    norms = (("norm1", "attention"), ("norm2", "mlp"))
    """The norm before each sublayer."""

    def __init__(
        self, norm1: nn.Module, attention: nn.Module, norm2: AddNorm, mlp: nn.Module, dropout: float
    ) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = norm1, attention, norm2, mlp
        self.dropout = dropout

    def forward(
        self,
        x_BTD: Tensor,
        *tables: Tensor,
        cache: LayerCache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """tables: the model's `context`."""
        attended_BTD = self.attention(self.norm1(x_BTD), *tables, cache=cache, documents=documents)
        x_BTD, normed_BTD = self.norm2(x_BTD, F.dropout(attended_BTD, self.dropout, self.training))
        return x_BTD + F.dropout(self.mlp(normed_BTD), self.dropout, self.training)


def block_dict(blocks: list[nn.Module]) -> nn.ModuleDict:
    """Blocks keyed by their number, so that a part of them keeps its names: blocks.7.attention..."""
    return nn.ModuleDict({str(number): block for number, block in enumerate(blocks)})
