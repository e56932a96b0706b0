"""Autograd functions that send messages or put work off: linear layers, and the activations between tensor-parallel
regions.

Between two regions an activation is either *whole* on every rank, after an all-reduce, or *cut along the sequence*
(`sp`; Megatron-LM, arXiv 1909.08053 and 2205.05198). A cut activation is all-gathered at the entry of a region; at its
exit a reduce-scatter sums it and cuts it again. Both ways send the same bytes, but with `sp` norms, dropout and the
residual stream take 1/tp of the work and memory. With `sp_regather` what is gathered takes 1/tp of the memory, too, for
one more gather per region in backward. With `tp_chunks`, messages and the products beside linear layers are cut, and
overlap (schedules/chunks.py).

Deferred weight gradients let a pipeline split backward into I and W (zero bubble, arXiv 2401.10241). I computes the
gradient of a linear layer's input, which the previous stage waits for, and queues the matmul for the gradient of its
weight. W runs the queue. I frees the graph of the microbatch; until W, only each layer's input and the gradient of its
output remain.

Legend: B batch, T sequence, t = T/tp, D model; "tp" ranks on the axis.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold.comm import Axis
from fivefold.kernels import matmul
from fivefold.kernels.rounded import RoundedMatmuls
from fivefold.models.layers import Linear
from fivefold.parallel import operators
from fivefold.parallel.operators import Wait
from fivefold.schedules.chunks import actions
from fivefold.sharding.units import AGAIN, SUM, WHOLE, What


@dataclass(frozen=True)
class TensorAxis:
    """The tensor axis, and the form of activations on it. sp: outside of its regions they are cut along the sequence.
    regather: a region's first matmul keeps its piece of the input, and gathers the others again in backward.

    ordered: with sp, a region gets the sequence in order, (B, T, D). Where tokens are independent, the pieces may also
    lie one after the other, (tp B, t, D), which saves a copy of each activation. chunks: of a piece, of u = t / chunks
    tokens each, in linear layers; where not ordered they lie one after the other, (chunks tp B, u, D).
    """

    axis: Axis
    sp: bool
    ordered: bool = True
    regather: bool = False
    chunks: int = 1

    @property
    def size(self) -> int:
        return self.axis.size

    @property
    def index(self) -> int:
        return self.axis.index

    def start_sum(self, x: Tensor) -> Wait:
        """Starts the sum of every rank's x, which has a region's shape and may be overwritten. The result is whole, or
        with sp this rank's piece (B, t, D)."""
        return self.start(SUM[self.sp], x)

    def start_whole(self, x: Tensor) -> Wait:
        """Makes the activation whole: x itself, or with sp gathered from every rank's piece (B, t, D)."""
        return self.start(WHOLE[self.sp], x)

    def start(self, operation: What | None, x: Tensor, *after: Tensor) -> Wait:
        """Sends an activation by a collective of `sharding.units`: gathered is (B, T, D), or if not ordered (tp B, t,
        D); scattered is each rank's piece of the sequence (B, t, D). after: see `operators.start`."""
        if operation == "all_reduce":
            return operators.start(self.axis, operation, x)
        if operation == "reduce_scatter":
            pieces = self._by_chunk(x, 1) if self.ordered else x  # (tp B, t, D)
            return operators.start(self.axis, "reduce_scatter", pieces.contiguous())
        if operation is None:
            return lambda *_: x
        wait = operators.start(self.axis, "all_gather", x.contiguous(), *after)
        if not self.ordered:
            return lambda *behind: wait(*behind).unflatten(1, (self.chunks, -1)).transpose(0, 1).flatten(0, 1)
        return lambda *behind: self._joined([wait(*behind)])

    def gather(
        self, x: Tensor, product: Callable[[Tensor], Tensor], again: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Makes this rank's piece (B, t, D) whole, and multiplies it: what arrives, and the product, as a region has
        them. again: the piece instead of what arrives."""
        if self.chunks == 1:
            whole = self.start_whole(x)()
            return x if again else whole, product(whole)
        leaving = x.unflatten(1, (self.chunks, -1)).unbind(1)
        waits: list[Wait] = []
        arrived: list[Tensor] = []
        products: list[Tensor] = []
        for what, chunk in actions(True, self.chunks):
            if what == "start":
                one = leaving[chunk].contiguous()
                waits.append(operators.start(self.axis, "all_gather", one, *arrived[-1:]))
            elif what == "wait":
                arrived.append(waits[chunk](*products[-1:]))
            else:
                products.append(product(arrived[chunk]))
        whole = x if again else self._joined(arrived)
        del arrived, waits  # before the products are put together
        return whole, self._joined(products)

    def scatter(self, x: Any, product: Callable[[Any], Tensor]) -> tuple[list[Tensor], Wait]:
        """Multiplies what a region has, and starts the sums of the products over ranks: the products, which are under
        way, and the wait for the sums, as `start_sum`."""
        if self.chunks == 1:
            y = product(x)
            return [y], self.start_sum(y)
        parts = self._by_chunk(x, self.chunks).chunk(self.chunks)
        waits: list[Wait] = []
        products: list[Tensor] = []
        for what, chunk in actions(False, self.chunks):
            if what == "multiply":
                products.append(product(parts[chunk]))
            elif what == "start":
                waits.append(operators.start(self.axis, "reduce_scatter", products[chunk]))
        return products, lambda *behind: torch.cat([wait(*behind) for wait in waits], 1)

    def _by_chunk(self, x: Tensor, chunks: int) -> Tensor:
        """A region's activation as (chunks tp B, u, D)."""
        if not self.ordered:
            return x
        return x.unflatten(1, (self.size, chunks, -1)).permute(2, 1, 0, 3, 4).flatten(0, 2)

    def _joined(self, parts: list[Tensor]) -> Tensor:
        """The chunks (tp B, u, D) of a region's activation as one."""
        if not self.ordered:
            return torch.cat(parts)
        parts = [part.unflatten(0, (self.size, -1)).transpose(0, 1) for part in parts]
        return (torch.stack(parts, 2) if parts[1:] else parts[0]).flatten(1, -2)


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
    return sent(lambda x: axis.start("all_gather", x)(), lambda dx: piece(dx, axis, 1), x)


def join(x: Tensor, axis: TensorAxis) -> Tensor:
    """Gathers logits over the vocabulary: (B, T, V/tp) -> (B, T, V)."""

    def gathered(x: Tensor) -> Tensor:
        return torch.cat(axis.axis.all_gather(x.contiguous()).chunk(axis.size), dim=-1)

    return sent(gathered, lambda dx: piece(dx, axis, -1), x)


WeightGradient = partial[None]
"""`_add_weight_gradient` with its tensors (weight, dy, x)."""


class Deferred:
    """`queue` collects weight gradients while `collect` runs a backward; otherwise it is None."""

    def __init__(self) -> None:
        self.queue: deque[WeightGradient] | None = None
        self.collected: list[ref[deque[WeightGradient]]] = []

    def collect(self, backward: Callable[[], None]) -> deque[WeightGradient]:
        """Runs a backward and returns the weight gradients that it deferred."""
        self.queue = queue = deque()
        self.collected = [one for one in self.collected if one()] + [ref(queue)]
        try:
            backward()
        finally:
            self.queue = None
        return queue

    def kept(self) -> list[Tensor]:
        """The inputs and the gradients of outputs that deferred weight gradients keep, without the scales of rounded
        ones."""
        queues = [queue for one in self.collected if (queue := one())]
        tensors = (tensor for queue in queues for gradient in queue for tensor in gradient.args[1:])
        return [getattr(tensor, "numbers", tensor) for tensor in tensors]


def attach(stage: nn.Module, deferred: Deferred) -> None:
    """Lets the linear layers of a stage defer their weight gradients while `deferred` collects.

    Other parameters (norms, biases, embeddings, the fused output and loss) get their gradients in I: that work is
    small, or was done in F. Compiled modules are not supported: the compiler cannot trace through the queue.
    """
    for module in stage.modules():
        if isinstance(module, Linear) and type(module).forward is Linear.forward:
            module.forward = partial(_linear, module, deferred)
        elif hasattr(module, "deferred"):  # a layer that defers by itself
            module.deferred = deferred  # pyright: ignore[reportArgumentType]


def _linear(module: Linear, deferred: Deferred, input: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return matmul.linear(input, module.weight, module.bias, module.rounded)
    return LinearFunction.apply(input, module.weight, module.bias, deferred, module.rounded)


class LinearFunction(Function):
    """x (..., D), weight (F, D), bias (F) or None -> (..., F).

    enters, leaves: the axis of a column-parallel or of a row-parallel layer. A column-parallel one
    makes x whole before the matmul, a row-parallel one sums the results behind it. x is kept whole; or with `regather`
    as a piece, which backward gathers while dx is computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        deferred: Deferred | None,
        rounded: RoundedMatmuls | None,
        enters: TensorAxis | None = None,
        leaves: TensorAxis | None = None,
    ) -> Tensor:
        once = rounded and rounded.once(weight, False)

        def product(x: Tensor) -> Tensor:
            return matmul.linear(x, weight, None if leaves else bias, once)

        kept, y = enters.gather(x, product, enters.regather) if enters else (x, None)
        if torch.compiler.is_compiling():
            ctx.save_for_backward(kept, weight)
        else:  # under recomputation a saved weight would come back as a copy
            ctx.save_for_backward(kept)
            ctx.weight = weight
        ctx.deferred, ctx.has_bias, ctx.rounded = deferred, bias is not None, rounded
        ctx.enters, ctx.leaves = enters, leaves
        if leaves is None:
            return product(x) if y is None else y
        products, total = leaves.scatter(x, product)
        y = total(*products)  # a compiler would move a wait that reads none to its start
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        x, *others = ctx.saved_tensors
        (weight,), enters, leaves, dpiece = others or (ctx.weight,), ctx.enters, ctx.leaves, grads[0]
        if enters or leaves:
            dpiece = dpiece.contiguous()

        def product() -> Callable[[Any], Tensor]:
            once = ctx.rounded and ctx.rounded.once(weight, True)
            return lambda dy: matmul.input_gradient(dy, weight, once)

        dy, dx, dweight, total = dpiece, None, None, None
        if enters:  # the sum overlaps with the gradients that need no communication
            whole = enters.start(AGAIN[enters.regather], x, dy)
            dy = ctx.rounded.both(dy) if ctx.rounded and enters.chunks == 1 else dy
            products, total = enters.scatter(dy, product())
            x = whole(*products)
        elif leaves and leaves.chunks > 1 and ctx.needs_input_grad[0]:
            dy, dx = leaves.gather(dpiece, product())
        else:
            dy = leaves.start_whole(dpiece)() if leaves else dpiece  # even if only other ranks need it
            dy = ctx.rounded.both(dy) if ctx.rounded else dy
            dx = product()(dy) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            dweight = weight_gradient(ctx.deferred, weight, dy, x, ctx.rounded)
        dbias = dpiece.flatten(0, -2).sum(0) if ctx.has_bias else None
        if total is not None:
            dx = total(*[g for g in (dweight, dbias) if g is not None])
        return dx, dweight, dbias, *[None] * 4


def weight_gradient(
    deferred: Deferred | None, weight: Tensor, dy: Any, x: Tensor, rounded: RoundedMatmuls | None = None
) -> Tensor | None:
    """Returns dy^T x; None while `deferred` collects, when the matmul is in its queue.

    weight (F, D), the parameter itself; dy (..., F), perhaps rounded; x (..., D).
    """
    if deferred is None or deferred.queue is None:
        return matmul.weight_gradient(dy, x, rounded)
    deferred.queue.append(partial(_add_weight_gradient, weight, dy, x, rounded=rounded))
    return None


def _add_weight_gradient(weight: Tensor, dy: Any, x: Tensor, rounded: RoundedMatmuls | None) -> None:
    """Adds it through autograd, so hooks on the parameter see it."""
    torch.autograd.backward(weight, matmul.weight_gradient(dy, x, rounded))
