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
        elif hasattr(module, "later"):  # a layer that does it by itself
            module.later = later  # pyright: ignore[reportArgumentType]


def _linear(module: Linear, later: Later, input: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return kernels.linear(input, module.weight, module.bias)
    return _Linear.apply(input, module.weight, module.bias, later)


class _Linear(Function):
    """x (..., D), weight (F, D), bias (F) or None -> (..., F)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, later: Later) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # itself: where activations are recomputed, a saved one would come back as a copy
        ctx.later, ctx.has_bias = later, bias is not None
        return kernels.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        (x,), weight, dy = ctx.saved_tensors, ctx.weight, grads[0]
        dweight = weight_gradient(ctx.later, weight, dy, x)
        dx = kernels.linear(dy, weight.t()) if ctx.needs_input_grad[0] else None
        return dx, dweight, dy.flatten(0, -2).sum(0) if ctx.has_bias else None, None


def weight_gradient(later: Later | None, weight: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    """dy^T x, for a layer's backward to return; None where `later` collects, and has got the work.

    weight (F, D), the parameter itself; dy (..., F); x (..., D).
    """
    if later is None or later.queue is None:
        return dy.flatten(0, -2).t() @ x.flatten(0, -2)
    later.queue.append(partial(_add_weight_gradient, weight, dy, x))
    return None


def _add_weight_gradient(weight: Tensor, dy: Tensor, x: Tensor) -> None:
    """Through autograd: hooks on the parameter see the gradient."""
    torch.autograd.backward(weight, dy.flatten(0, -2).t() @ x.flatten(0, -2))
