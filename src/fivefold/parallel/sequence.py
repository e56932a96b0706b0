"""Activations that the ranks of the tensor axis have partial sums or pieces of, and how they become whole.

Two ways (Megatron-LM, arXiv 1909.08053 and 2205.05198). Between two tensor-parallel regions an activation is either
*whole* on every rank, made so by an all-reduce; or *cut along the sequence* (`sp`), made whole by an all-gather at the
entry of a region and summed and cut again by a reduce-scatter at its exit: the same bytes, and norms, dropout and the
residual stream take 1/tp of the work and memory.

Legend: B batch, T sequence, t = T/tp, D model; "tp" ranks on the axis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

# The names of torch 2.13 where it has them: the old ones warn there.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Wait = Callable[[], Tensor]
"""Waits for a collective that was started, and returns its result."""


@dataclass(frozen=True)
class TensorAxis:
    """The tensor axis as one rank sees it. sp: activations outside its regions are cut along the sequence.

    ordered: with sp, a region gets the sequence as it is, (B, T, D). Where no token sees another, the pieces may as
    well come one after the other, (tp B, t, D), which saves a copy of each activation.
    """

    group: dist.ProcessGroup
    size: int
    index: int
    sp: bool
    ordered: bool = True

    def start_sum(self, x: Tensor) -> Wait:
        """Sum of every rank's x, as large as a region's activations, which may be overwritten: whole, or with sp this
        rank's piece (B, t, D)."""
        return start_scatter(x, self) if self.sp else start_all_reduce(x, self)


def start_all_reduce(x: Tensor, axis: TensorAxis) -> Wait:
    """Sum of every rank's x, in place."""
    work = dist.all_reduce(x, group=axis.group, async_op=True)
    assert work is not None

    def wait() -> Tensor:
        work.wait()
        return x

    return wait


def start_scatter(x: Tensor, axis: TensorAxis) -> Wait:
    """Sum of every rank's x, (B, T, D) or (tp B, t, D); each gets its piece of the sequence, (B, t, D)."""
    pieces = x.contiguous()  # (tp B, t, D)
    if axis.ordered:
        B, T, D = x.shape
        assert T % axis.size == 0, f"{T} tokens over {axis.size} ranks"
        pieces = x.view(B, axis.size, T // axis.size, D).transpose(0, 1).reshape(axis.size * B, -1, D)
    out = x.new_empty(pieces.shape[0] // axis.size, *pieces.shape[1:])
    work = scatter_single(out, pieces, group=axis.group, async_op=True)
    assert work is not None

    def wait() -> Tensor:
        work.wait()
        return out

    return wait


def start_gather(x_BtD: Tensor, axis: TensorAxis) -> Wait:
    """The whole sequence from every rank's piece: (B, T, D), or where it need not be in order (tp B, t, D)."""
    B, t, D = x_BtD.shape
    out = x_BtD.new_empty(axis.size * B, t, D)
    work = gather_single(out, x_BtD.contiguous(), group=axis.group, async_op=True)
    assert work is not None

    def wait() -> Tensor:
        work.wait()
        if not axis.ordered:
            return out
        return out.view(axis.size, B, t, D).transpose(0, 1).reshape(B, axis.size * t, D)

    return wait


def piece(x: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    """This rank's piece of a whole tensor along a dim: a view."""
    size = x.shape[dim] // axis.size
    return x.narrow(dim, axis.index * size, size)


class Enter(Function):
    """Into a tensor-parallel region, Megatron's f: x as it is, or with sp gathered. Backward sums the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return start_gather(x, axis)() if axis.sp else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        return ctx.axis.start_sum(grads[0].clone(memory_format=torch.contiguous_format))(), None


class Leave(Function):
    """Out of a region, Megatron's g: the sum of every rank's x, which is overwritten; with sp its piece."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        if not axis.sp:
            ctx.mark_dirty(x)
        return axis.start_sum(x)()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        return start_gather(grads[0], ctx.axis)() if ctx.axis.sp else grads[0], None


class Whole(Function):
    """From pieces of the sequence to a computation that every rank does alike: backward takes its piece of the
    gradient, which every rank has as a whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return start_gather(x, axis)()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        return piece(grads[0], ctx.axis, 1), None


class Join(Function):
    """Logits of a part of the vocabulary, (B, T, V/tp) -> of all of it, (B, T, V)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        parts = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
        gather_single(parts, x.contiguous(), group=axis.group)
        return torch.cat(parts.chunk(axis.size), dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        return piece(grads[0], ctx.axis, grads[0].ndim - 1), None
