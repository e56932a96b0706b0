"""Collectives of tensor parallelism: they make activations whole from partial sums, or from pieces of the sequence.

There are two ways (Megatron-LM, arXiv 1909.08053 and 2205.05198). Between two tensor-parallel regions an activation is
either *whole* on every rank, after an all-reduce, or *cut along the sequence* (`sp`). A cut activation is all-gathered
at the entry of a region; at its exit a reduce-scatter sums it and cuts it again. Both ways send the same bytes, but
with `sp` norms, dropout and the residual stream take 1/tp of the work and memory. With `sp_regather` what is gathered
takes 1/tp of the memory, too, for one more gather per region in backward.

Legend: B batch, T sequence, t = T/tp, D model; "tp" ranks on the axis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold.comm import Axis
from fivefold.sharding.units import AGAIN, SUM, WHOLE

Wait = Callable[[], Tensor]
"""Waits for a message that was started, and returns its result."""


@dataclass(frozen=True)
class TensorAxis:
    """The tensor axis, and the form of activations on it. sp: outside of its regions they are cut along the sequence.
    regather: a region's first matmul keeps its piece of the input, and gathers the others again in backward.

    ordered: with sp, a region gets the sequence in order, (B, T, D). Where tokens are independent, the pieces may also
    lie one after the other, (tp B, t, D), which saves a copy of each activation.
    """

    axis: Axis
    sp: bool
    ordered: bool = True
    regather: bool = False

    @property
    def size(self) -> int:
        return self.axis.size

    @property
    def index(self) -> int:
        return self.axis.index

    def start_sum(self, x: Tensor) -> Wait:
        """Starts the sum of every rank's x, which has a region's shape and may be overwritten. The result is whole, or
        with sp this rank's piece (B, t, D)."""
        return SENDS[SUM[self.sp]](x, self)

    def start_whole(self, x: Tensor) -> Wait:
        """Makes the activation whole: x itself, or with sp gathered from every rank's piece (B, t, D)."""
        return SENDS[WHOLE[self.sp]](x, self)

    def start_again(self, kept: Tensor) -> Wait:
        """Makes the kept input of a region's first matmul whole in backward: it is, or it is gathered again."""
        return SENDS[AGAIN[self.regather]](kept, self)


def start_scatter(x: Tensor, axis: TensorAxis) -> Wait:
    """Starts the sum of every rank's x, (B, T, D) or (tp B, t, D). Each rank gets its piece of the sequence (B, t,
    D)."""
    pieces = x.contiguous()  # (tp B, t, D)
    if axis.ordered:
        B, T, D = x.shape
        assert T % axis.size == 0, f"{T} tokens over {axis.size} ranks"
        pieces = x.view(B, axis.size, T // axis.size, D).transpose(0, 1).reshape(axis.size * B, -1, D)
    return axis.axis.start_reduce_scatter(pieces)


def start_gather(x_BtD: Tensor, axis: TensorAxis) -> Wait:
    """Starts to gather the whole sequence from every rank's piece: (B, T, D), or if not ordered (tp B, t, D)."""
    (B, t, D), started = x_BtD.shape, axis.axis.start_all_gather(x_BtD.contiguous())
    if not axis.ordered:
        return started
    return lambda: started().view(axis.size, B, t, D).transpose(0, 1).reshape(B, axis.size * t, D)


SENDS: dict[str | None, Callable[[Tensor, TensorAxis], Wait]] = {
    None: lambda x, axis: lambda: x,
    "all_gather": start_gather,
    "all_reduce": lambda x, axis: axis.axis.start_all_reduce(x),
    "reduce_scatter": start_scatter,
}
"""How activations are sent, by the names of `sharding.units`."""


def piece(x: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    """A view of this rank's piece of a whole tensor along a dim."""
    size = x.shape[dim] // axis.size
    return x.narrow(dim, axis.index * size, size)


class _Sent(Function):
    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Any], backward: Callable[..., Any], *inputs: Tensor):
        ctx.by = backward
        return forward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        sent = ctx.by(*grads)
        return None, None, *(sent if isinstance(sent, tuple) else (sent,))


def sent(forward: Callable[..., Any], backward: Callable[..., Any], *inputs: Tensor) -> Any:
    """`forward` of some tensors, such as a message; `backward` makes their gradients out of those of the results, and
    needs none of the tensors."""
    return _Sent.apply(forward, backward, *inputs)


def enter(x: Tensor, axis: TensorAxis) -> Tensor:
    """Enters a tensor-parallel region (Megatron's f): x unchanged, or gathered with sp. Backward sums the gradients."""

    def gathered(x: Tensor) -> Tensor:
        whole = axis.start_whole(x)()
        return whole.view_as(whole)  # autograd needs a tensor other than its input

    contiguous = torch.contiguous_format
    return sent(gathered, lambda dx: axis.start_sum(dx.clone(memory_format=contiguous))(), x)


class Leave(Function):
    """Leaves a region (Megatron's g): the sum of every rank's x, which is overwritten; with sp this rank's piece."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        if not axis.sp:
            ctx.mark_dirty(x)
        return axis.start_sum(x)()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        return ctx.axis.start_whole(grads[0])(), None


def whole(x: Tensor, axis: TensorAxis) -> Tensor:
    """Gathers the sequence for a computation that every rank repeats. In backward every rank has the whole gradient and
    takes its piece."""
    return sent(lambda x: start_gather(x, axis)(), lambda dx: piece(dx, axis, 1), x)


def join(x: Tensor, axis: TensorAxis) -> Tensor:
    """Gathers logits over the vocabulary: (B, T, V/tp) -> (B, T, V)."""

    def gathered(x: Tensor) -> Tensor:
        return torch.cat(axis.axis.all_gather(x.contiguous()).chunk(axis.size), dim=-1)

    return sent(gathered, lambda dx: piece(dx, axis, -1), x)
