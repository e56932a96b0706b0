"""Products with weights.

In fp32 on CPUs they go to oneDNN, which PyTorch asks by itself only in lower precision: its products of activations
with weights (forward, and the gradient of the input) take 5 to 20% less time than MKL's on the processors tried
(benchmarks/products.py). MKL keeps the gradient of the weight, where it is ahead.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias. x (..., D), weight (F, D), bias (F) -> (..., F).

    Inside autograd functions, linear(dy, weight.t()) is the gradient of a linear layer's input.
    """
    if not _onednn(x, weight):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return _product(x, weight, bias)
    kept = _Kept.apply(x, weight, bias)
    return _Linear.apply(kept, x.detach(), weight.detach(), None if bias is None else bias.detach())


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """oneDNN's, which autograd does not know. It takes each element of a bias to be next to the one before."""
    bias = None if bias is None else bias.contiguous()
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN can and may take this product. Empty ones and errors are PyTorch's."""
    return (
        not torch.compiler.is_compiling()
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and x.dim() > 1
        and x.numel() > 0
        and weight.numel() > 0
        and x.shape[-1] == weight.shape[-1]
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and not torch.is_autocast_enabled("cpu")
    )


class _Kept(Function):
    """Keeps what backward needs, and computes the gradients. Its result (..., F) has no memory of its own, and nobody
    reads it: it stands for the product, which is computed after this. So where activations are computed again, which
    ends with the last tensor that is kept, the product is not: as with PyTorch's own operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.as_strided((*x.shape[:-1], weight.shape[0]), (0,) * x.dim())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        (x, weight), dy = ctx.saved_tensors, grads[0]
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dx = _product(dy, weight.t()) if needs_x else None
        dweight = dy.flatten(0, -2).t() @ x.flatten(0, -2) if needs_weight else None
        return dx, dweight, dy.flatten(0, -2).sum(0) if needs_bias else None


class _Linear(Function):
    """The product in the place of what stands for it."""

    @staticmethod
    def forward(ctx: Any, kept: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        return grads[0], None, None, None
