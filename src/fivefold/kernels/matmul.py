"""The three matmuls of a linear layer: its output, the gradient of its input, the gradient of its weight. Every layer
uses them, even one that communicates or defers its weight gradient.

With `rounded` their factors are rounded (rounded.py). Most CPUs multiply fp16 in fp32 (`wide`). On CPUs in fp32, and
in bf16 with a bias, each goes to PyTorch's library or to oneDNN, whichever is faster on the processor (native.py).

Below: the output layer and the cross-entropy in one; full logits never exist. The loss takes its rows in chunks
(kernels/sizes.py). A chunk's logits become their own gradient in place, and forward multiplies it into the gradients of
input and weight at once (the idea of Liger Kernel, arXiv 2410.10989). Memory: the logits of one chunk instead of N x V.

Legend: D input features, F output features; n rows (tokens), V columns on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.library import custom_op

from fivefold.host.machine import has_cpu_fp16
from fivefold.kernels import native, sizes
from fivefold.kernels.cross_entropy import (
    Keys,
    add_z_gradient,
    cap_,
    drawn,
    local_targets,
    vocabulary_gradient,
    vocabulary_loss,
    vocabulary_statistics,
)
from fivefold.kernels.elementwise import add_gradient
from fivefold.kernels.native import INPUT_GRADIENT, OUTPUT, PRODUCTS, WEIGHT_GRADIENT, onednn_linear
from fivefold.kernels.rounded import RoundedMatmuls


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, rounded: RoundedMatmuls | None = None
) -> Tensor:
    """x @ weight.T + bias. x (..., D), weight (F, D), bias (F) -> (..., F)."""
    if rounded is None and _one_row(x, weight):
        out = x.new_empty(*x.shape[:-1], weight.shape[0])
        vector, bias = x.reshape(-1).float(), None if bias is None else bias.contiguous()
        native.call("matrix_vector", x.dtype, weight, vector, bias, out, *weight.shape)
        return out
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


def input_gradient(dy: Any, weight: Tensor, rounded: RoundedMatmuls | None = None) -> Tensor:
    """dy @ weight. dy (..., F), weight (F, D) -> (..., D)."""
    if rounded is not None:
        return rounded.input_gradient(dy, weight)
    return _product(dy, weight.t(), product=INPUT_GRADIENT)


def weight_gradient(dy: Any, x: Tensor, rounded: RoundedMatmuls | None = None) -> Tensor:
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


def _onednn(
    products: tuple[str, ...], x: Tensor, weight: Tensor, bias: Tensor | None = None, elements: int = 0
) -> bool:
    """True if oneDNN can and may compute this, and is faster in any of these products than PyTorch's own way. elements:
    of the layer's weight, if it is not `weight`."""
    return (
        not torch.compiler.is_compiling()
        and x.dtype == weight.dtype
        and native.has_onednn(x.dtype)
        and x.device.type == "cpu"
        and torch.backends.mkldnn.enabled
        and _fits(x, weight)
        and native.by_onednn(products, x, elements or weight.numel(), bias is not None)
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
        both = ctx.rounded.both(dy) if ctx.rounded else dy
        dx = input_gradient(both, weight, ctx.rounded) if needs_x else None
        dweight = weight_gradient(both, x, ctx.rounded) if needs_weight else None
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


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    z_loss: float = 0.0,
    drawing: Keys | None = None,
    cap: float = 0.0,
) -> Tensor:
    """Mean over targets >= 0 of the cross-entropy of x @ weight.T + bias, in fp32, plus z_loss * log-sum-exp^2.

    x (N, D), weight (V, D), targets (N) int64 with -100 for "not counted", bias (V) or None. Returns a scalar; 0
    where no target counts. drawing: the targets are numbers of tokens, whose labels the model draws (`drawn`).
    cap: of logits (`cap_`); 0: none.
    """
    return _LinearCrossEntropy.apply(
        x, weight, targets.long(), bias, torch.is_grad_enabled(), z_loss, drawing, cap
    )


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        gradients: bool,
        z_loss: float,
        drawing: Keys | None,
        cap: float,
    ) -> Tensor:
        assert targets.shape == x.shape[:1], "one target a row"
        if drawing is None:
            assert_on_device((targets < len(weight)).all(), "a target beyond the vocabulary")

        def chunk(part: slice, losses: Tensor, scale: Tensor) -> Tensor:
            logits, labels = linear(x[part], weight, bias), targets[part]
            slope = cap_(logits, cap) if cap else None
            if drawing is not None:
                labels = labels.where(labels < 0, drawn(logits, labels, drawing)[1])
            return loss_and_gradient(logits, labels, losses, scale, z_loss, slope=slope)

        loss, dx, dweight, dbias = mean_by_chunks(ctx, x, weight, targets, bias, gradients, chunk)
        ctx.save_for_backward(dx, dweight, dbias)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        factor = grads[0] if ctx.ahead is None else grads[0] / ctx.ahead
        found = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        dx, dweight, dbias = (None if g is None else times(g, factor, dtype) for g, dtype in found)
        return dx, dweight, None, dbias, *[None] * 4


def times(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient * factor (scalar) in this dtype, in one pass over memory. With the gradient's own it is in its place."""
    out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    return torch.mul(gradient, factor, out=out)


def mean_by_chunks(
    ctx: Any,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    gradients: bool,
    chunk: Callable[[slice, Tensor, Tensor], Tensor],
    complete: Callable[[Tensor], None] = lambda dx: None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The mean loss of the rows of x (N, D), and the gradients of x, weight and bias: those that autograd asks `ctx`
    for, larger by the factor `ctx.ahead` of `scaled`.

    chunk: (rows, their losses to fill, factor of the mean) -> the gradient of these rows' logits. complete: gets dx
    before the last gradient of the weight is computed.
    """
    N, rows, scale, ctx.ahead = len(x), rows_at_once(x, len(weight)), mean_scale(targets), _ahead
    made = scale if _ahead is None else scale * _ahead
    losses = torch.empty(N, dtype=torch.float32, device=x.device)
    needs_x, needs_weight, _, needs_bias = (needed and gradients for needed in ctx.needs_input_grad[:4])
    dx = torch.empty_like(x) if needs_x else None
    # where no target counts other ranks still expect a gradient to sum
    dweight = torch.zeros_like(weight) if needs_weight and N == 0 else None
    dbias = torch.zeros_like(bias) if needs_bias and bias is not None and N == 0 else None
    for start in range(0, N, max(1, rows)):
        part = slice(start, start + rows)
        dlogits = chunk(part, losses[part], made)
        if dx is not None:
            dx[part] = input_gradient(dlogits, weight)
            if part.stop >= N:
                complete(dx)
        if needs_weight:
            dweight = add_product(dweight, dlogits, x[part], rows >= N)
        if needs_bias:
            dbias = _add_chunk(dbias, dlogits.sum(0), rows >= N)
        del dlogits  # before the next chunk's
    return losses.sum() * scale, dx, dweight, dbias


_ahead: Tensor | None = None


@contextmanager
def scaled(factor: Tensor | None) -> Iterator[None]:
    """Computes the gradients of losses `factor` times as large meanwhile. Forward makes them, and fp16 would lose what
    backward's factor comes too late for. Backward divides by it: it does not change what backward returns."""
    global _ahead
    before, _ahead = _ahead, factor
    try:
        yield
    finally:
        _ahead = before


def assert_on_device(holds: Tensor, otherwise: str) -> None:
    """Raises RuntimeError unless `holds` (bool scalar); on a GPU the kernel fails, and the host does not wait for it.
    PyTorch does not document it. Without it such a check stops the host until the GPU has caught up."""
    torch._assert_async(holds, otherwise)


def mean_scale(targets: Tensor) -> Tensor:
    """1 / (number of targets that count), an fp32 scalar on their device: reading it would stop the host."""
    return (1.0 / (targets >= 0).sum().clamp(min=1).double()).float()


def rows_at_once(x: Tensor, V: int) -> int:
    """Rows of x (N, D) whose V logits are computed at once."""
    return sizes.rows_at_once(x.shape[0], V, x.shape[1], x.element_size(), sizes.logits_bytes(x.device.type))


def loss_and_gradient(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    scale: Tensor,
    z_loss: float = 0.0,
    first: int = 0,
    together: Callable[[Tensor], Tensor] | None = None,
    slope: Tensor | None = None,
) -> Tensor:
    """Fills losses (n) and returns scale * (softmax - onehot), in place of the logits (n, V). together: the statistics
    (3, n) of all ranks that have columns, (parts, 3, n), given this rank's; None: it has all columns. slope: the
    logits' derivative by what they were made from, which the gradient is multiplied by; None: 1."""
    if slope is not None:
        return loss_and_gradient(logits, targets, losses, scale, z_loss, first, together).mul_(slope)
    targets = targets.contiguous()
    if together is None and not z_loss and native.usable(logits):
        native.call("cross_entropy", logits.dtype, logits, targets, losses, scale, *logits.shape)
        return logits
    statistics = vocabulary_statistics(logits, targets, first)
    lse, loss = vocabulary_loss(together(statistics) if together else statistics[None])
    gradient, counted = vocabulary_gradient(logits, targets, lse, first, scale), targets >= 0
    losses.copy_(loss * counted)
    if z_loss:
        lse = lse * counted
        losses.add_(z_loss * lse.square())
        here, index = local_targets(targets, first, logits.shape[1])
        add_z_gradient(gradient, index[:, None], here, lse, scale, z_loss)
    return gradient


def add_product(total: Tensor | None, dlogits: Tensor, x: Tensor, only: bool) -> Tensor:
    """total (None: 0) + dlogits.T @ x in fp32, for instance the chunks' gradients of the weight; an `only` one in the
    dtype of x. NVIDIA's GPUs add in the matmul itself."""
    own = dlogits.device.type == "cuda" and dlogits.dtype != torch.float32 and torch.version.hip is None
    if only or not own:
        return _add_chunk(total, weight_gradient(dlogits, x), only)
    if total is None:
        total = x.new_zeros(dlogits.shape[1], x.shape[1], dtype=torch.float32)
    _add_product_on_gpu(total, dlogits, x)
    return total


@custom_op("fivefold::add_product", mutates_args=("total",), device_types="cuda")
def _add_product_on_gpu(total: Tensor, dlogits: Tensor, x: Tensor) -> None:
    """total (V, D) in fp32 += dlogits.T @ x, whose factors have 16 bits. PyTorch cannot trace it before 2.13."""
    torch.addmm(total, dlogits.t(), x, out_dtype=torch.float32, out=total)


@_add_product_on_gpu.register_fake
def _(total: Tensor, dlogits: Tensor, x: Tensor) -> None:
    assert total.shape == (dlogits.shape[1], x.shape[1]), "one row a column of the logits"
    assert len(dlogits) == len(x), "as many rows"


def _add_chunk(total: Tensor | None, part: Tensor, only: bool) -> Tensor:
    """Adds up chunks in fp32. A single chunk needs no sum."""
    if only:
        return part
    if total is None:
        return part.float()
    add_gradient(total, part, first=False)
    return total
