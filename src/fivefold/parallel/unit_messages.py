"""Sends the messages of FSDP2's units over our axes: weight gathers, gradient scatters, and sums over replicas.

ZeRO++ (arXiv 2306.10209) sends fewer bytes of ZeRO 3 between nodes. A unit's weights are gathered in two messages:
across the nodes, between ranks with the same place on each; then inside each node. Gradients go the opposite way.
`layout.zeropp` says what else:

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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fivefold.comm import Axis, Started
from fivefold.kernels.rounded import Quantizer
from fivefold.parallel import private
from fivefold.parallel.mesh import Mesh
from fivefold.schedules.compression.blocks import Blocks
from fivefold.sharding.units import FsdpUnit, ZeroPP, zeropp


class UnitMessages:
    """The messages of one unit. sent: dtype of gradient messages. masters: dtype of weights and gradients. gathers,
    scatters: those of ZeRO++, which take the place of the axis' own.

    In a hybrid the replicas sum their gradients once per step: in the `last` microbatch, together with the gradients
    that earlier microbatches have scattered (stages 2 and 3). FSDP2 adds these up in the buffer that `arrived` first;
    the gradients of the rows are views of it.
    """

    gathers: Gathers | None = None
    scatters: Scatters | None = None

    def __init__(self, mesh: Mesh, unit: FsdpUnit, sent: torch.dtype, masters: torch.dtype = torch.float32):
        self.name = name = unit.module or "outside of blocks"
        self.axis, self.replicas = mesh.axis(unit.group).of_unit(name), mesh.axis("replicate").of_unit(name)
        self.mesh, self.table = mesh, unit
        self.sent, self.masters, self.last, self.sums = sent, masters, True, mesh.sums("replicate")
        self.seen: Callable[[Tensor], None] | None = None
        self.arrived: Tensor | None = None
        self._summing: Started | None = None

    def attach(self, module: FSDPModule) -> None:
        """Makes FSDP2 send the messages of a unit through this object."""
        self.module = module
        shares, plus = private.shares(module), zeropp(self.mesh.layout.zeropp)
        assert sorted(shares) == sorted(self.table.shares), f"{self.name}: FSDP2 sends {shares}"
        if plus.two_gathers:
            self.gathers = Gathers(plus, self.mesh, self.name, shares)
        if plus.gradients:
            self.scatters = Scatters(plus, self.mesh, self.name, shares)
        module.set_custom_all_gather(_Gather(self))  # pyright: ignore[reportArgumentType]
        module.set_custom_reduce_scatter(_Scatter(self))  # pyright: ignore[reportArgumentType]
        if self.replicas.size > 1:
            module.set_all_reduce_hook(self.sum_replicas)

    def sum_replicas(self, rows: Tensor) -> None:
        """Sums a microbatch's gradients over replicas. rows: flat; FSDP2 is about to add them to the gradients of
        earlier microbatches. On GPUs it has allocated them on its scatter stream and calls this on another one, so the
        allocator is told who else reads them."""
        for gradients in (rows, self.arrived):
            if gradients is not None and gradients.is_cuda:
                gradients.record_stream(torch.cuda.current_stream())
        if not self.last:
            self.arrived = rows if self.arrived is None else self.arrived
            return
        if self.arrived is not None:
            rows += self.arrived
            self.arrived = None
            private.forget_gradients(self.module)
        self.finish()
        self._summing = self.sums.start(rows, self.replicas.purpose)
        if rows.is_cuda:  # FSDP2 called this on a stream, which waits instead of the host
            self.finish()

    def finish(self) -> None:
        """Waits for the sum over replicas. On CPUs it overlaps with the rest of backward: gradients are views of the
        rows, and nobody reads them before."""
        if self._summing is not None:
            self._summing()
            self._summing = None


class _Buffers:
    """Allocates buffers for FSDP2, which asks this of a custom message."""

    def __init__(self, messages: UnitMessages):
        self.messages = messages

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Buffers):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        axis, gathers = self.messages.axis, self.messages.gathers
        if not async_op and gathers is None:
            axis.all_gather(input_tensor, output_tensor)
            return None
        if gathers is None:
            return _Waits(axis.start_all_gather(input_tensor, output_tensor))
        finish = gathers.start(input_tensor, output_tensor)
        if async_op:
            return _Waits(finish)
        finish()
        return None


class _Scatter(_Buffers):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM, op
        assert not async_op
        messages = self.messages
        if messages.seen is not None:
            messages.seen(input_tensor)
        if messages.scatters is not None:
            messages.scatters.sum(input_tensor, output_tensor)
        else:
            messages.axis.sum_scatter(input_tensor, output_tensor, messages.sent)


class _Waits(dist.Work):
    """Wraps a started message as a `Work` that FSDP2 can wait for."""

    def __init__(self, started: Callable[[], object]):
        super().__init__()
        self.started = started

    def wait(self, timeout: Any = None) -> bool:
        self.started()
        return True


class Gathers:
    """ZeRO++'s weight gathers of one unit. shares: elements of each of its parameters on a rank."""

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
    """ZeRO++'s gradient sums of one unit."""

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
