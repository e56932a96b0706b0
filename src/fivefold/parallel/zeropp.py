"""ZeRO++ (arXiv 2306.10209): the weight gathers and gradient sums of ZeRO 3 with fewer bytes between nodes.

A unit's weights are gathered in two messages: across the nodes, between ranks with the same place on each; then inside
each node. Gradients go the opposite way. `layout.zeropp` says what else:

- weights (qwZ): a rank's weights travel as int8, encoded once. All ranks, their owner too, compute with what is
  decoded.
- hier (hpZ): what the message across has brought is a share of all weights, and a node's ranks together have them once.
  Each rank keeps its share until the weights change, so all later gathers stay inside the node.
- gradients (qgZ): ranks exchange encoded gradients inside the node and sum them in fp32, then do the same across. So
  each gradient is encoded twice, whatever the number of ranks. What a rank keeps for itself is never encoded.

Legend: p ranks on each of k nodes share a unit; S elements of a rank's share; R the same as sent, in bytes or elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fivefold.comm import Axis
from fivefold.kernels.quantize import Quantizer
from fivefold.parallel.mesh import Mesh
from fivefold.schedules.compression.blocks import Blocks
from fivefold.sharding.syncs import ZeroPP


class Gathers:
    """The weight gathers of one unit. shares: elements of each of its parameters on a rank."""

    def __init__(self, plus: ZeroPP, mesh: Mesh, unit: str, shares: Sequence[int]):
        self.inside, self.across = (mesh.axis(name).of_unit(unit) for name in ("inside", "across"))
        self.hier, self.code = plus.hier and self.across.size > 1, _quantizer(plus.weights, shares, mesh)
        self.copy: Tensor | None = None

    def start(self, mine: Tensor, out: Tensor) -> Callable[[], object]:
        """Starts to gather every rank's `mine` (S) into `out` (k p S); returns what finishes it. The first message is
        under way meanwhile."""
        if self.copy is not None:
            everyone = self.inside.start_all_gather(self.copy)
            return lambda: self._place(everyone(), out)
        first = self.across.start_all_gather(self._encoded(mine))

        def finish() -> None:
            share = first()  # (k R)
            if self.hier:
                self.copy = share
            self._place(self.inside.all_gather(share), out)

        return finish

    def forget(self) -> None:
        """The weights have changed."""
        self.copy = None

    def _encoded(self, mine: Tensor) -> Tensor:
        if self.code is None:
            return mine
        sent = torch.empty(self.code.R, dtype=torch.uint8, device=mine.device)
        self.code.encode(mine[None], sent[None])
        return sent

    def _place(self, gathered: Tensor, out: Tensor) -> None:
        """Puts what the node's ranks have of all nodes (p k R) in the order of ranks (k p S)."""
        k, p = self.across.size, self.inside.size
        gathered, out = gathered.view(p, k, -1), out.view(k, p, -1)
        if self.code is None:
            out.copy_(gathered.transpose(0, 1))
            return
        for place in range(p):
            self.code.decode(gathered[place], out[:, place])


class Scatters:
    """The gradient sums of one unit."""

    def __init__(self, plus: ZeroPP, mesh: Mesh, unit: str, shares: Sequence[int]):
        self.inside, self.across = (mesh.axis(name).of_unit(unit) for name in ("inside", "across"))
        self.code = _quantizer(plus.gradients, shares, mesh)

    def sum(self, x: Tensor, out: Tensor) -> Tensor:
        """Sums every rank's x (k p S) and writes this rank's share into `out` (S). Both: fp32."""
        k, p = self.across.size, self.inside.size
        of_place = x.view(k, p, -1).transpose(0, 1)  # (p, k, S)
        mine = self._exchanged(of_place, self.inside)  # (k, S)
        return out.copy_(self._exchanged(mine[:, None], self.across)[0])

    def _exchanged(self, x: Tensor, axis: Axis) -> Tensor:
        """Sends x[i] (r, S) to rank i of the axis, and sums what all ranks have sent to this one, itself first."""
        total, others = x[axis.index].clone(), [rank for rank in range(axis.size) if rank != axis.index]
        if not others:
            return total
        assert self.code is not None
        sent = torch.empty(*x.shape[:2], self.code.R, dtype=torch.uint8, device=x.device)
        for rank in others:
            self.code.encode(x[rank], sent[rank])
        received = axis.all_to_all(sent)
        for rank in others:
            self.code.decode(received[rank], total, add=True)
        return total


def _quantizer(blocks: Blocks | None, shares: Sequence[int], mesh: Mesh) -> Quantizer | None:
    return blocks and Quantizer(blocks.bits, blocks.block, shares, mesh.device)
