"""The three matmuls of a linear layer: its output, the gradient of its input, the gradient of its weight. Every layer
uses them, even one that communicates or defers its weight gradient.

With `rounded` their factors are rounded (rounded.py). Most CPUs multiply fp16 in fp32 (`wide`). On CPUs in fp32, and
in bf16 with a bias, each goes to PyTorch's library or to oneDNN, whichever is faster on the processor (`fastest.py`).

Legend: D input features, F output features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold.host.machine import has_cpu_fp16
from fivefold.kernels import fastest, native
from fivefold.kernels.fastest import INPUT_GRADIENT, OUTPUT, PRODUCTS, WEIGHT_GRADIENT
from fivefold.kernels.private import onednn_linear
from fivefold.kernels.rounded import RoundedMatmuls


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, rounded: RoundedMatmuls | None = None
) -> Tensor:
    """x @ weight.T + bias. x (..., D), weight (F, D), bias (F) -> (..., F)."""
    if rounded is None and _one_row(x, weight):
        return _matrix_vector(x, weight, bias)
    if rounded is None and not (
        _onednn(PRODUCTS, x, weight, bias) or (widened(x, weight) and _fits(x, weight))
    ):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return _forward(x, weight, bias, rounded)
    if torch.compiler.is_compiling():
        return _Whole.apply(x, weight, bias, rounded)
    kept = _Kept.apply(x, weight, bias, rounded)
    return _Linear.apply(kept, x.detach(), weight.detach(), None if bias is None else bias.detach(), rounded)


def input_gradient(dy: Tensor, weight: Tensor, rounded: RoundedMatmuls | None = None) -> Tensor:
    """dy @ weight. dy (..., F), weight (F, D) -> (..., D)."""
    if rounded is not None:
        return rounded.input_gradient(dy, weight)
    return _product(dy, weight.t(), product=INPUT_GRADIENT)


def weight_gradient(dy: Tensor, x: Tensor, rounded: RoundedMatmuls | None = None) -> Tensor:
    """dy.T @ x, summed over all leading dims. dy (..., F), x (..., D) -> (F, D)."""
    if rounded is not None:
        return rounded.weight_gradient(dy, x)
    dy_FN, x_DN = wide(dy).flatten(0, -2).t(), wide(x).flatten(0, -2).t()
    if _onednn((WEIGHT_GRADIENT,), dy_FN, x_DN, elements=len(dy_FN) * len(x_DN)):
        return onednn_linear(dy_FN, x_DN).to(dy.dtype)
    return (dy_FN @ x_DN.t()).to(dy.dtype)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, rounded: RoundedMatmuls | None) -> Tensor:
    if rounded is None:
        return _product(x, weight, bias)
    y = rounded.forward(x, weight)
    return y if bias is None else y.add_(bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None, product: str = OUTPUT) -> Tensor:
    """x @ weight.T + bias, without autograd. product: which of the three it is."""
    a, b, c = wide(x), wide(weight), None if bias is None else wide(bias)
    return (onednn_linear if _onednn((product,), a, b, c) else F.linear)(a, b, c).to(x.dtype)


def _one_row(x: Tensor, weight: Tensor) -> bool:
    """True if this is a matrix times one vector in 16 bits, as in generation. It takes as long as the matrix is read;
    oneDNN takes up to three times as long."""
    return (
        not torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and x.numel() == x.shape[-1] == weight.shape[-1] > 0
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and native.usable(x, weight)
    )


def _matrix_vector(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    vector = x.reshape(-1).float()
    bias = None if bias is None else bias.contiguous()
    native.call("matrix_vector", x.dtype, weight, vector, bias, out, *weight.shape)
    return out


def _onednn(
    products: tuple[str, ...], x: Tensor, weight: Tensor, bias: Tensor | None = None, elements: int = 0
) -> bool:
    """True if oneDNN can and may compute this, and is faster in any of these products than PyTorch's own way. elements:
    of the layer's weight, if it is not `weight`."""
    return (
        not torch.compiler.is_compiling()
        and x.dtype == weight.dtype
        and fastest.usable(x.dtype)
        and x.device.type == "cpu"
        and torch.backends.mkldnn.enabled
        and _fits(x, weight)
        and fastest.by_onednn(products, x, elements or weight.numel(), bias is not None)
    )


def _fits(x: Tensor, weight: Tensor) -> bool:
    """False for what is left to PyTorch: vectors, empty tensors, errors, autocast."""
    return (
        x.dim() > 1
        and x.numel() > 0
        and weight.numel() > 0
        and x.shape[-1] == weight.shape[-1]
        and not torch.is_autocast_enabled("cpu")
    )


class _Kept(Function):
    """Saves tensors for backward, and computes the gradients. Its result (..., F) is a placeholder for the output
    without memory of its own; nobody reads it, and `_Linear` computes the output after it. Recomputation stops at the
    last saved tensor, so it does not repeat this matmul, just as it would not repeat PyTorch's own."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rounded: RoundedMatmuls | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rounded = rounded
        return x.as_strided((*x.shape[:-1], weight.shape[0]), (0,) * x.dim())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        (x, weight), dy = ctx.saved_tensors, grads[0]
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dx = None
        if needs_x:
            dx = input_gradient(dy, weight, ctx.rounded)
        dweight = weight_gradient(dy, x, ctx.rounded) if needs_weight else None
        return dx, dweight, dy.flatten(0, -2).sum(0) if needs_bias else None, None


class _Linear(Function):
    """Replaces the placeholder by the output."""

    @staticmethod
    def forward(
        ctx: Any, kept: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, rounded: RoundedMatmuls | None
    ) -> Tensor:
        return _forward(x, weight, bias, rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        return grads[0], None, None, None, None


class _Whole(_Kept):
    """Both at once, for PyTorch's compiler, which cannot trace the placeholder."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rounded: RoundedMatmuls | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rounded = rounded
        return _forward(x, weight, bias, rounded)


def widened(*tensors: Tensor) -> bool:
    """True if matmuls take these in fp32. What PyTorch's compiler traces stays as it is."""
    for x in tensors:  # asked at every matmul: the dtype alone decides most often
        if x.dtype != torch.float16 or x.device.type != "cpu":
            return False
    return not torch.compiler.is_compiling() and not has_cpu_fp16()


def wide(x: Tensor) -> Tensor:
    """x as matmuls take it. Nobody should keep it: backward converts the saved tensor again."""
    return x.float() if widened(x) else x
