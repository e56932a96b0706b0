"""The three matmuls of a linear layer: its output, the gradient of its input, the gradient of its weight. Every layer
uses them, even one that communicates or defers its weight gradient.

With `rounded` their factors are rounded (rounded.py). Most CPUs multiply fp16 in fp32 (`wide`). On CPUs in fp32, and
in bf16 with a bias, each goes to PyTorch's library or to oneDNN, whichever is faster on the processor (native.py).

Below: the output layer and the cross-entropy in one; full logits never exist. The loss takes its rows in chunks
(kernels/sizes.py). A chunk's logits become their own gradient in place, and forward multiplies it into the gradients of
input and weight at once (the idea of Liger Kernel, arXiv 2410.10989). Memory: the logits of one chunk instead of N x V.

Last the same where a rank has some columns of the logits only: the statistics that other ranks need, and the gradient
once the log-sum-exp over the whole vocabulary is known.

Legend: D input features, F output features; n rows (tokens), V columns on this rank, `first` the index of its first
column in the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.library import custom_op

from fivefold.host.machine import has_cpu_fp16
from fivefold.kernels import native, sizes
from fivefold.kernels.elementwise import add_gradient
from fivefold.kernels.hashing import chunk_on, hash_
from fivefold.kernels.native import INPUT_GRADIENT, OUTPUT, PRODUCTS, WEIGHT_GRADIENT, onednn_linear
from fivefold.kernels.rounded import RoundedMatmuls
from fivefold.precision.card import MOST_IDS
from fivefold.sharding.units import LOSS_STATISTICS

Keys = tuple[int, int]
"""Of the hash that draws (hashing.py)."""


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
        dx = input_gradient(dy, weight, ctx.rounded) if needs_x else None
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


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    z_loss: float = 0.0,
    drawing: Keys | None = None,
) -> Tensor:
    """Mean over targets >= 0 of the cross-entropy of x @ weight.T + bias, in fp32, plus z_loss * log-sum-exp^2.

    x (N, D), weight (V, D), targets (N) int64 with -100 for "not counted", bias (V) or None. Returns a scalar; 0
    where no target counts. drawing: the targets are numbers of tokens, whose labels the model draws (`drawn`).
    """
    return _LinearCrossEntropy.apply(
        x, weight, targets.long(), bias, torch.is_grad_enabled(), z_loss, drawing
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
    ) -> Tensor:
        assert targets.shape == x.shape[:1], "one target a row"
        if drawing is None:
            assert_on_device((targets < len(weight)).all(), "a target beyond the vocabulary")

        def chunk(part: slice, losses: Tensor, scale: Tensor) -> Tensor:
            logits, labels = linear(x[part], weight, bias), targets[part]
            if drawing is not None:
                labels = labels.where(labels < 0, drawn(logits, labels, drawing)[1])
            return loss_and_gradient(logits, labels, losses, scale, z_loss)

        loss, dx, dweight, dbias = mean_by_chunks(ctx, x, weight, targets, bias, gradients, chunk)
        ctx.save_for_backward(dx, dweight, dbias)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        factor = grads[0] if ctx.ahead is None else grads[0] / ctx.ahead
        dx, dweight, dbias = ctx.saved_tensors
        for gradient in (dx, dweight, dbias):  # in place: they are used once
            if gradient is not None:
                gradient.mul_(factor)
        dweight = None if dweight is None else dweight.to(ctx.dtypes[0])
        return dx, dweight, None, None if dbias is None else dbias.to(ctx.dtypes[1]), None, None, None


def drawn(logits: Tensor, tokens: Tensor, key: Keys, first: int = 0) -> tuple[Tensor, Tensor]:
    """The largest logit plus Gumbel noise of each row, (n) fp32, and its number in the vocabulary, (n) int64. Over the
    whole vocabulary that number is a draw from the softmax (Gumbel, 1954; Maddison et al., arXiv 1411.0030).

    logits (n, V): columns from `first` on. tokens (n) int64: the noise depends on (key, token, column) alone, so every
    layout draws the same labels, unless rounding decides between two sums that are almost equal.
    """
    best, labels = logits.new_empty(len(logits), dtype=torch.float32), torch.empty_like(tokens)
    columns = torch.arange(first, first + logits.shape[1], device=logits.device)
    rows = max(1, chunk_on(logits.device) // max(1, logits.shape[1]))
    for start in range(0, len(logits), rows):
        part = slice(start, start + rows)
        bits = hash_(tokens[part, None].clamp(min=0) * MOST_IDS + columns, *key)
        uniform = (bits >> 32).bitwise_and_(0xFFFFFFFF).float().add_(0.5).mul_(2.0**-32)  # (0, 1]
        noise = uniform.neg_().log1p_().neg_().log_()  # of an exponential variable: minus Gumbel's
        best[part], index = (logits[part].float() - noise).max(1)
        labels[part] = index + first
    return best, labels


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
            dweight = _add_product(dweight, dlogits, x[part], rows >= N)
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
    logits: Tensor, targets: Tensor, losses: Tensor, scale: Tensor, z_loss: float = 0.0
) -> Tensor:
    """Fills losses (n) and returns scale * (softmax - onehot), in place of the logits (n, V)."""
    if z_loss:
        index, counted = targets.clamp(min=0)[:, None], targets >= 0
        at_target = logits.gather(1, index)[:, 0].float()
        loss_and_gradient(logits, targets, losses, scale)
        lse = (losses + at_target) * counted
        losses.add_(z_loss * lse.square())
        return add_z_gradient(logits, index, counted, lse, scale, z_loss)
    if native.usable(logits):
        native.call("cross_entropy", logits.dtype, logits, targets.contiguous(), losses, scale, *logits.shape)
        return logits
    lse, loss = vocabulary_loss(vocabulary_statistics(logits, targets, 0)[None])
    losses.copy_(loss * (targets >= 0))
    return vocabulary_gradient(logits, targets, lse, 0, scale)


def add_z_gradient(
    gradient: Tensor, index: Tensor, here: Tensor, lse: Tensor, scale: Tensor, z_loss: float
) -> Tensor:
    """scale * (softmax * (1 + 2 z_loss lse) - onehot), in place of scale * (softmax - onehot) (n, V). index: (n, 1)
    columns of the targets that are `here` (n). lse: (n), 0 where no target counts."""
    more = 2 * z_loss * lse
    gradient.mul_((1 + more)[:, None])
    return gradient.scatter_add_(1, index, (scale * more * here)[:, None].to(gradient.dtype))


def _add_product(total: Tensor | None, dlogits: Tensor, x: Tensor, only: bool) -> Tensor:
    """Adds up the chunks' gradients of the weight. GPUs add in the matmul itself."""
    if only or dlogits.device.type != "cuda" or dlogits.dtype == torch.float32:
        return _add_chunk(total, weight_gradient(dlogits, x), only)
    if total is None:
        total = x.new_zeros(dlogits.shape[1], x.shape[1], dtype=torch.float32)
    _add_product_on_gpu(total, dlogits, x)
    return total


@custom_op(
    "fivefold::add_product",
    mutates_args=("total",),
    device_types="cuda",
    schema="(Tensor(a!) total, Tensor dlogits, Tensor x) -> ()",
)
def _add_product_on_gpu(total: Tensor, dlogits: Tensor, x: Tensor) -> None:
    """total (V, D) in fp32 += dlogits.T @ x, whose factors have 16 bits. PyTorch cannot trace it before 2.13."""
    torch.addmm(total, dlogits.t(), x, out_dtype=torch.float32, out=total)


@_add_product_on_gpu.register_fake
def _(total: Tensor, dlogits: Tensor, x: Tensor) -> None: ...


def _add_chunk(total: Tensor | None, part: Tensor, only: bool) -> Tensor:
    """Adds up chunks in fp32. A single chunk needs no sum."""
    if only:
        return part
    if total is None:
        return part.float()
    add_gradient(total, part, first=False)
    return total


def vocabulary_statistics(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """Statistics of this rank's columns, (3, n) fp32: the largest logit, the sum of exp(logit - largest), and the
    target's logit, or 0 if another rank has it. logits (n, V), targets (n) int64 in the whole vocabulary, negative for
    "not counted"."""
    if native.usable(logits):
        out = torch.empty(LOSS_STATISTICS, len(logits), dtype=torch.float32)
        native.call("vocabulary_statistics", logits.dtype, logits, targets, out, *logits.shape, first)
        return out
    if logits.device.type == "cuda":
        return _statistics_on_gpu(logits, targets, first)
    out = logits.new_empty(LOSS_STATISTICS, len(logits), dtype=torch.float32)
    for part in sizes.fp32_parts(*logits.shape):
        out[:, part] = _statistics(logits[part], targets[part], first)
    return out


def _statistics(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    here, index = local_targets(targets, first, logits.shape[1])
    whole = logits.float()
    top = whole.amax(1, keepdim=True)
    total = (whole - top).exp_().sum(1, keepdim=True)
    return torch.stack([top[:, 0], total[:, 0], whole.gather(1, index[:, None])[:, 0] * here])


def vocabulary_loss(statistics: Tensor) -> tuple[Tensor, Tensor]:
    """Statistics of all ranks (parts, 3, n) -> log-sum-exp (n) and cross-entropy (n) of each row."""
    top, total, at_target = statistics.unbind(1)
    largest = top.amax(0)
    lse = (total * (top - largest).exp()).sum(0).log() + largest
    return lse, lse - at_target.sum(0)


def vocabulary_gradient(logits: Tensor, targets: Tensor, lse: Tensor, first: int, scale: Tensor) -> Tensor:
    """scale * (softmax - onehot) of this rank's columns, zero where the target is negative. It overwrites
    the logits."""
    if native.usable(logits):
        native.call(
            "vocabulary_gradient", logits.dtype, logits, targets, lse.contiguous(), scale, *logits.shape, first
        )  # fmt: skip
        return logits
    if logits.device.type == "cuda":
        _gradient_on_gpu(logits, targets, lse, first, scale)
        return logits
    for part in sizes.fp32_parts(*logits.shape):
        _gradient(logits[part], targets[part], lse[part], first, scale)
    return logits


def _gradient(logits: Tensor, targets: Tensor, lse: Tensor, first: int, scale: Tensor) -> None:
    here, index = local_targets(targets, first, logits.shape[1])
    gradient = (logits.float() - lse[:, None]).exp_()
    if torch.compiler.is_compiling():  # it compares on its way, and would scatter in a pass of its own
        columns = torch.arange(logits.shape[1], device=logits.device)
        gradient = gradient - (here[:, None] & (columns == index[:, None])).float()
    else:
        gradient.scatter_add_(1, index[:, None], -here.float()[:, None])
    logits.copy_(gradient.mul_((targets >= 0)[:, None] * scale))


compiled = cache(torch.compile)
"""`torch.compile` itself takes milliseconds, also of what is compiled."""


@custom_op(
    "fivefold::vocabulary_statistics",
    mutates_args=(),
    schema="(Tensor logits, Tensor targets, int first) -> Tensor",
)
def _statistics_on_gpu(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """`_statistics`, compiled: one pass over the logits. A trace sees one operator."""
    return compiled(_statistics)(logits, targets, first)


@_statistics_on_gpu.register_fake
def _(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    return logits.new_empty(LOSS_STATISTICS, len(logits), dtype=torch.float32)


@custom_op(
    "fivefold::vocabulary_gradient",
    mutates_args=("logits",),
    schema="(Tensor(a!) logits, Tensor targets, Tensor lse, int first, Tensor scale) -> ()",
)
def _gradient_on_gpu(logits: Tensor, targets: Tensor, lse: Tensor, first: int, scale: Tensor) -> None:
    """`_gradient`, compiled: one pass, too."""
    compiled(_gradient)(logits, targets, lse, first, scale)


@_gradient_on_gpu.register_fake
def _(logits: Tensor, targets: Tensor, lse: Tensor, first: int, scale: Tensor) -> None: ...


def local_targets(targets: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """(True where a target is on this rank, its column or 0)."""
    here = (targets >= first) & (targets < first + columns)
    return here, (targets - first) * here
