"""Linear attention under context parallelism: an all-to-all gives a rank all tokens of some heads, and another one
gives them back, as Ulysses does for attention (arXiv 2309.14509), whatever `cp_method` says of the other blocks.

Convolution, state and documents are then those of one process: no state is passed on, and no rank waits for the one
before it. Passing states on (a head's is d x e numbers) would send less of long sequences, but needs columns in one
piece, and the other blocks deal them (sharding/sequence.py). The ranks must divide the heads.

Legend: B batch, T sequence, t = T/c tokens of a rank, c ranks, H value heads, W features of a rank's heads.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fivefold.comm import Axis
from fivefold.kernels.blockwise_attention import Documents
from fivefold.kernels.elementwise import to_device
from fivefold.models.delta import DeltaCore, DeltaWeights
from fivefold.models.layers import StateCache
from fivefold.parallel import operators
from fivefold.parallel.autograd import sent
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import Columns
from fivefold.sharding.sequence import token_spans
from fivefold.sharding.units import HEADS


class DeltaByHeads(DeltaCore):
    """`DeltaCore` of this rank's tokens (B, t, ...), each with the state of all tokens before it. The weights are those
    of all heads."""

    def __init__(self, core: DeltaCore, axis: Axis, layout: Layout) -> None:
        assert core.kv_heads % axis.size == 0, "refused by the recipe's rules"
        super().__init__(core.heads // axis.size, core.kv_heads // axis.size, core.key, core.value)
        self.axis, self.layout = axis, layout

    def forward(
        self,
        mixed: Tensor,
        by: DeltaWeights,
        documents: Documents | None = None,
        cache: StateCache | None = None,
    ) -> Tensor:
        c, T = self.axis.size, mixed.shape[1] * self.axis.size
        of_all = [size * c for size in self.sections]
        # (B, t, c, features of a head)
        parts = [part.unflatten(-1, (c, -1)) for part in mixed.split(of_all, -1)]
        arrived = self._exchange(torch.cat(parts, -1).permute(2, 0, 1, 3))  # (c, B, t, W), of each rank
        columns = documents.columns if documents is not None else ()
        columns = columns or tuple(tuple(token_spans(self.layout, T, index)) for index in range(c))
        places, order = _order(columns, mixed.device)
        whole = arrived.transpose(0, 1).flatten(1, 2).index_select(1, order)  # (B, T, W)
        conv = torch.cat([self._own(part) for part in by.conv_FW.split(of_all[:3])])
        own = DeltaWeights(conv, self._own(by.a_log_H), self._own(by.dt_H))
        out = super().forward(whole, own, documents)
        leaving = out.index_select(1, places).unflatten(1, (c, -1)).transpose(0, 1)  # (c, B, t, W)
        return self._exchange(leaving).permute(1, 2, 0, 3).flatten(2)

    def _own(self, weights: Tensor) -> Tensor:
        """Those of this rank's heads."""
        return weights.chunk(self.axis.size)[self.axis.index]

    def _exchange(self, parts: Tensor) -> Tensor:
        """Sends a part (B, t, W) to each rank, and returns those of all ranks: (c, B, t, W)."""

        def forward(x: Tensor) -> Tensor:
            return operators.run(self.axis, HEADS, x.contiguous())

        def backward(dx: Tensor) -> Tensor:
            return operators.run(self.axis, HEADS, dx.contiguous(), backward=True)

        return sent(forward, backward, parts)


@lru_cache(maxsize=64)
def _order(columns: tuple[Columns, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The column of each token, rank by rank, and the inverse: where the token of each column is."""
    places = torch.cat([torch.arange(a, b) for spans in columns for a, b in spans])
    return to_device(places, device), to_device(places.argsort(), device)
