"""Deferred weight gradients: they let a pipeline split backward into I and W (zero bubble, arXiv 2401.10241).

I computes the gradient of a linear layer's input, which the previous stage waits for, and queues the matmul for the
gradient of its weight. W runs the queue. I frees the graph of the microbatch; until W, only each layer's input and the
gradient of its output remain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold.kernels import matmul
from fivefold.kernels.rounded import RoundedMatmuls
from fivefold.models.layers import Linear
from fivefold.parallel.sequence import TensorAxis

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
        """The inputs and the gradients of outputs that deferred weight gradients keep."""
        queues = [queue for one in self.collected if (queue := one())]
        return [tensor for queue in queues for gradient in queue for tensor in gradient.args[1:]]


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

    enters, leaves: the axis of a column-parallel or of a row-parallel layer (parallel/tensor.py). A column-parallel one
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
        whole = enters.start_whole(x)() if enters else x
        ctx.save_for_backward(x if enters and enters.regather else whole)
        ctx.weight = weight  # not saved: under recomputation a saved weight would come back as a copy
        ctx.deferred, ctx.has_bias, ctx.rounded = deferred, bias is not None, rounded
        ctx.enters, ctx.leaves = enters, leaves
        if leaves is None:
            return matmul.linear(whole, weight, bias, rounded)
        y = leaves.start_sum(matmul.linear(whole, weight, None, rounded))()
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        (x,), weight, enters, leaves, dpiece = ctx.saved_tensors, ctx.weight, ctx.enters, ctx.leaves, grads[0]
        if enters or leaves:
            dpiece = dpiece.contiguous()
        dy = leaves.start_whole(dpiece)() if leaves else dpiece
        whole = enters.start_again(x) if enters else lambda: x
        needed = enters or ctx.needs_input_grad[0]  # other ranks expect a message
        dx = matmul.input_gradient(dy, weight, ctx.rounded) if needed else None
        x = whole()
        # the sum overlaps with the gradients that need no communication
        total = enters.start_sum(dx) if enters and dx is not None else lambda: dx
        dweight = weight_gradient(ctx.deferred, weight, dy, x, ctx.rounded)
        dbias = dpiece.flatten(0, -2).sum(0) if ctx.has_bias else None
        return total(), dweight, dbias, *[None] * 4


def weight_gradient(
    deferred: Deferred | None, weight: Tensor, dy: Tensor, x: Tensor, rounded: RoundedMatmuls | None = None
) -> Tensor | None:
    """Returns dy^T x; None while `deferred` collects, when the matmul is in its queue, and for a frozen weight.

    weight (F, D), the parameter itself; dy (..., F); x (..., D).
    """
    if not weight.requires_grad:
        return None
    if deferred is None or deferred.queue is None:
        return matmul.weight_gradient(dy, x, rounded)
    deferred.queue.append(partial(_add_weight_gradient, weight, dy, x, rounded=rounded))
    return None


def _add_weight_gradient(weight: Tensor, dy: Tensor, x: Tensor, rounded: RoundedMatmuls | None) -> None:
    """Adds it through autograd, so hooks on the parameter see it."""
    torch.autograd.backward(weight, matmul.weight_gradient(dy, x, rounded))
