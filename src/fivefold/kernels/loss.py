"""Output projection and cross-entropy in one; full logits never exist.

The loss takes its rows in chunks (kernels/sizes.py). A chunk's logits become their own gradient in place, and forward
multiplies it into the gradients of input and weight at once (the idea of Liger Kernel, arXiv 2410.10989). Memory: the
logits of one chunk instead of N x V.

Below them the same where a rank has some columns of the logits only: the statistics that other ranks need, and the
gradient once the log-sum-exp over the whole vocabulary is known.

Legend: n rows (tokens), V columns on this rank, `first` the index of its first column in the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold.kernels import native, sizes
from fivefold.kernels.elementwise import add_gradient
from fivefold.kernels.matmul import input_gradient, linear, weight_gradient
from fivefold.kernels.private import assert_on_device
from fivefold.sharding.units import LOSS_STATISTICS


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, z_loss: float = 0.0
) -> Tensor:
    """Mean over targets >= 0 of the cross-entropy of x @ weight.T + bias, in fp32, plus z_loss * log-sum-exp^2.

    x (N, D), weight (V, D), targets (N) int64 with -100 for "not counted", bias (V) or None. Returns a scalar; 0
    where no target counts.
    """
    return _LinearCrossEntropy.apply(x, weight, targets.long(), bias, torch.is_grad_enabled(), z_loss)


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
    ) -> Tensor:
        assert targets.shape == x.shape[:1], "one target a row"
        assert_on_device((targets < len(weight)).all(), "a target beyond the vocabulary")

        def chunk(part: slice, losses: Tensor, scale: Tensor) -> Tensor:
            return loss_and_gradient(linear(x[part], weight, bias), targets[part], losses, scale, z_loss)

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
        return dx, dweight, None, None if dbias is None else dbias.to(ctx.dtypes[1]), None, None


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
            dweight = _add_chunk(dweight, weight_gradient(dlogits, x[part]), rows >= N)
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
    for part in sizes.fp32_parts(*logits.shape):
        _plain_loss_and_gradient(logits[part], targets[part], losses[part], scale)
    return logits


def add_z_gradient(
    gradient: Tensor, index: Tensor, here: Tensor, lse: Tensor, scale: Tensor, z_loss: float
) -> Tensor:
    """scale * (softmax * (1 + 2 z_loss lse) - onehot), in place of scale * (softmax - onehot) (n, V). index: (n, 1)
    columns of the targets that are `here` (n). lse: (n), 0 where no target counts."""
    more = 2 * z_loss * lse
    gradient.mul_((1 + more)[:, None])
    return gradient.scatter_add_(1, index, (scale * more * here)[:, None].to(gradient.dtype))


def _plain_loss_and_gradient(logits: Tensor, targets: Tensor, losses: Tensor, scale: Tensor) -> None:
    """Holds `sizes.FP32_COPIES` fp32 tensors of the logits' size."""
    log_p = torch.log_softmax(logits.float(), dim=-1)
    counted = targets >= 0
    index = targets.clamp(min=0)[:, None]
    losses.copy_(-log_p.gather(1, index)[:, 0] * counted)
    gradient = log_p.exp_().scatter_add_(1, index, -torch.ones_like(index, dtype=log_p.dtype))
    logits.copy_(gradient.mul_(counted[:, None] * scale))


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
    here, index = local_targets(targets, first, logits.shape[1])
    out = logits.new_empty(LOSS_STATISTICS, len(logits), dtype=torch.float32)
    for part in sizes.fp32_parts(*logits.shape):
        whole = logits[part].float()
        top = whole.amax(1)
        at_target = whole.gather(1, index[part, None])[:, 0] * here[part]
        out[:, part] = torch.stack([top, (whole - top[:, None]).exp_().sum(1), at_target])
        del whole  # before the next part's
    return out


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
    here, index = local_targets(targets, first, logits.shape[1])
    for part in sizes.fp32_parts(*logits.shape):
        gradient = (logits[part].float() - lse[part, None]).exp_()
        gradient.scatter_add_(1, index[part, None], -here[part].float()[:, None])
        logits[part] = gradient.mul_((targets[part] >= 0)[:, None] * scale)
        del gradient  # before the next part's
    return logits


def local_targets(targets: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """(True where a target is on this rank, its column or 0)."""
    here = (targets >= first) & (targets < first + columns)
    return here, (targets - first) * here
