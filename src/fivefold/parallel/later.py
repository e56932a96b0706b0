"""Weight gradients that are computed later: what lets a pipeline split backward into I and W (arXiv 2401.10241).

In I, a linear layer computes the gradient of its input, which the stage before waits for, and puts the product for its
weight's gradient into a queue. W computes what is in the queue. The graph of the microbatch is gone after I; what
is kept until W is each layer's input and the gradient of its output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold import kernels
from fivefold.models.layers import Linear

Work = Callable[[], None]


class Later:
    """A queue of work that can wait, while `collect` runs a backward; else `queue` is None."""

    def __init__(self) -> None:
        self.queue: deque[Work] | None = None

    def collect(self, backward: Work) -> deque[Work]:
        """Runs a backward, and returns the work that it left."""
        self.queue = queue = deque()
        try:
            backward()
        finally:
            self.queue = None
        return queue


def attach(stage: nn.Module, later: Later) -> None:
    """Makes the linear layers of a stage leave their weight gradients in `later` while it collects.

    Other parameters (norms, biases, embeddings, the fused output and loss) get theirs in I: that work is small, or was
    done in F. Not for modules that are compiled: the compiler would have to see through the queue.
    """
    for module in stage.modules():
        if isinstance(module, Linear):
            module.forward = partial(_linear, module, later)


def _linear(module: Linear, later: Later, input: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return kernels.linear(input, module.weight, module.bias)
    return _Linear.apply(input, module.weight, module.bias, later)


class _Linear(Function):
    """x (..., D), weight (F, D), bias (F) or None -> (..., F)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, later: Later) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later, ctx.has_bias = later, bias is not None
        return kernels.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        (x, weight), dy, dweight = ctx.saved_tensors, grads[0], None
        if ctx.later.queue is None:
            dweight = weight_gradient(dy, x)
        else:
            ctx.later.queue.append(partial(add_weight_gradient, weight, dy, x))
        dx = torch.matmul(dy, weight) if ctx.needs_input_grad[0] else None
        return dx, dweight, dy.flatten(0, -2).sum(0) if ctx.has_bias else None, None


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dy (..., F), x (..., D) -> dy^T x, (F, D)."""
    return dy.flatten(0, -2).t() @ x.flatten(0, -2)


def add_weight_gradient(weight: Tensor, dy: Tensor, x: Tensor) -> None:
    """Adds dy^T x to the gradient of a parameter, through autograd: hooks on the parameter see it.

    weight (F, D), a parameter; dy (..., F); x (..., D).
    """
    torch.autograd.backward(weight, weight_gradient(dy, x))
