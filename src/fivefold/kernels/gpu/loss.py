"""The output layer and its cross-entropy without logits in memory.

Forward goes over tiles of the vocabulary, keeps of each row the largest logit, the sum of exponentials and the target's
logit, and forgets the tile: the softmax computed online (Milakov and Gimelshein, arXiv 1805.02867), with the matmul in
the same kernel (Cut Cross-Entropy, arXiv 2411.09009). Backward computes the logits of a slab of the vocabulary again,
as their gradient, and PyTorch's matmuls take it to the gradients of inputs and weights. A slab has all rows. So the
weight's gradient is complete after one product, and no two programs add to the same place: results are the same bits
each time. Against the loss by chunks of rows (matmul.py) it saves passes over logits and the fp32 sum of the weight's
gradient, which lives from forward to backward, and it computes 8 N V D FLOPs instead of 6.

Legend: N rows (tokens), D features, V columns on this rank, `first` the index of its first column in the vocabulary, S
spans of columns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from fivefold.kernels import cross_entropy, sizes
from fivefold.kernels.gpu.language import blocks, constexpr, jit, runs, tl
from fivefold.kernels.matmul import add_product, assert_on_device, mean_scale, weight_gradient
from fivefold.sharding.units import LOSS_STATISTICS

ROWS, COLUMNS, FEATURES, WARPS, STAGES = 128, 128, 64, 8, 3
"""A tile of logits, and the features that are multiplied at once, of 16 bits. In fp32 fewer: more spill
registers."""
SPANS = 8
"""Programs that share the vocabulary of a row, so that few rows fill a GPU, too."""


@jit
def _logits(x, weight, bias, rows, columns, N, V, D, BIASED: constexpr, FEATURES: constexpr, FORM: constexpr):
    """The logits of a tile in fp32, -inf beyond the vocabulary."""
    features = tl.arange(0, FEATURES)
    x_rows = x + rows.to(tl.int64)[:, None] * D
    weight_rows = weight + columns.to(tl.int64)[None, :] * D
    total = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    for start in range(0, D, FEATURES):
        here = start + features
        a = tl.load(x_rows + here[None, :], (rows < N)[:, None] & (here < D)[None, :], 0.0)
        b = tl.load(weight_rows + here[:, None], (columns < V)[None, :] & (here < D)[:, None], 0.0)
        total = tl.dot(a, b, total, input_precision=FORM)
    if BIASED:
        total += tl.load(bias + columns, columns < V, 0.0).to(tl.float32)[None, :]
    return tl.where((columns < V)[None, :], total, float("-inf"))


@jit
def _statistics_kernel(
    x, weight, bias, targets, out, N, V, D, first, span,
    BIASED: constexpr, ROWS: constexpr, COLUMNS: constexpr, FEATURES: constexpr, FORM: constexpr,
):  # fmt: skip
    """out (S, 3, N): of a program's rows and its span of columns."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    target = tl.load(targets + rows, rows < N, -1) - first
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    at_target = tl.zeros((ROWS,), tl.float32)
    begin = tl.program_id(1) * span
    for start in range(begin, min(begin + span, V), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        logits = _logits(x, weight, bias, rows, columns, N, V, D, BIASED, FEATURES, FORM)
        larger = tl.maximum(top, tl.max(logits, 1))
        total = total * tl.exp(top - larger) + tl.sum(tl.exp(logits - larger[:, None]), 1)
        at_target += tl.sum(tl.where(columns[None, :] == target[:, None], logits, 0.0), 1)
        top = larger
    out += tl.program_id(1).to(tl.int64) * 3 * N + rows
    tl.store(out, top, rows < N)
    tl.store(out + N, total, rows < N)
    tl.store(out + 2 * N, at_target, rows < N)


@jit
def _gradient_kernel(
    x, weight, bias, targets, top, dtotal, dat, out, N, V, D, first,
    BIASED: constexpr, ROWS: constexpr, COLUMNS: constexpr, FEATURES: constexpr, FORM: constexpr,
):  # fmt: skip
    """out (N, V): a tile of it. Neighbouring programs share their columns, and with them the weight in the cache."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    logits = _logits(x, weight, bias, rows, columns, N, V, D, BIASED, FEATURES, FORM)
    target = tl.load(targets + rows, rows < N, -1) - first
    factor, known = tl.load(dtotal + rows, rows < N, 0.0), tl.load(top + rows, rows < N, 0.0)
    at_target = tl.load(dat + rows, rows < N, 0.0)
    gradient = factor[:, None] * tl.exp(logits - known[:, None])
    gradient += tl.where(columns[None, :] == target[:, None], at_target[:, None], 0.0)
    places = out + rows.to(tl.int64)[:, None] * V + columns[None, :]
    tl.store(places, gradient.to(out.dtype.element_ty), (rows < N)[:, None] & (columns < V)[None, :])


def tile(dtype: torch.dtype) -> dict[str, Any]:
    """What the kernels are compiled for."""
    columns, features = (COLUMNS // 2, FEATURES // 4) if dtype.itemsize > 2 else (COLUMNS, FEATURES)
    form = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    compiled = {"ROWS": ROWS, "COLUMNS": columns, "FEATURES": features, "FORM": form}
    return compiled | {"num_warps": WARPS, "num_stages": STAGES}


@custom_op("fivefold::linear_statistics", mutates_args=())
def statistics(x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, first: int) -> Tensor:
    """`cross_entropy.vocabulary_statistics` of x @ weight.T + bias, (3, N) fp32. x (N, D), weight (V, D), bias (V),
    targets (N) in the whole vocabulary."""
    if not runs(x, weight, bias):
        return cross_entropy.vocabulary_statistics(F.linear(x, weight, bias), targets, first)
    x, weight, (N, D), V = x.contiguous(), weight.contiguous(), x.shape, len(weight)
    cut = tile(x.dtype)
    span = blocks(V, SPANS * cut["COLUMNS"]) * cut["COLUMNS"]
    out = x.new_empty(blocks(V, span), LOSS_STATISTICS, N, dtype=torch.float32)
    _statistics_kernel[(blocks(N, ROWS), len(out))](
        x, weight, bias, targets, out, N, V, D, first, span, BIASED=bias is not None, **cut
    )  # fmt: skip
    (top, total, at_target), largest = out.unbind(1), out[:, 0].amax(0)
    return torch.stack([largest, (total * (top - largest).exp()).sum(0), at_target.sum(0)])


@statistics.register_fake
def _(x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, first: int) -> Tensor:
    return x.new_empty(LOSS_STATISTICS, len(x), dtype=torch.float32)


@custom_op("fivefold::linear_gradient", mutates_args=())
def logit_gradient(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    statistics: Tensor,
    given: Tensor,
    first: int,
) -> Tensor:
    """The gradient of these columns' logits (N, V), given that of the statistics (3, N) of all of this rank's."""
    top, (_, dtotal, dat) = statistics[0], given.contiguous()
    if not runs(x, weight, bias):
        gradient = F.linear(x, weight, bias).float().sub_(top[:, None]).exp_().mul_(dtotal[:, None])
        here, index = cross_entropy.local_targets(targets, first, len(weight))
        return gradient.scatter_add_(1, index[:, None], (dat * here)[:, None]).to(x.dtype)
    x, weight, (N, D), V = x.contiguous(), weight.contiguous(), x.shape, len(weight)
    out, cut = x.new_empty(N, V), tile(x.dtype)
    _gradient_kernel[(blocks(N, ROWS), blocks(V, cut["COLUMNS"]))](
        x, weight, bias, targets, top, dtotal, dat, out, N, V, D, first, BIASED=bias is not None, **cut
    )  # fmt: skip
    return out


@logit_gradient.register_fake
def _(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(len(x), len(weight))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.first = inputs
    ctx.save_for_backward(*tensors, output)


def _backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
    """By slabs of columns. What depends on the largest logit only through the log-sum-exp does not depend on it: its
    own gradient and that of the sum by it cancel. So the gradient that is given for it is not used."""
    x, weight, targets, bias, statistics = ctx.saved_tensors
    wants_x, wants_weight, _, wants_bias, _ = ctx.needs_input_grad
    V, columns = len(weight), sizes.slab_columns(len(x), len(weight), x.element_size(), x.device.type)
    dx: Tensor | None = None
    dweight = torch.empty_like(weight) if wants_weight else None
    dbias = torch.empty_like(bias) if wants_bias else None
    for start in range(0, V, columns):
        part = slice(start, start + columns)
        some = None if bias is None else bias[part]
        dlogits = logit_gradient(x, weight[part], targets, some, statistics, given, ctx.first + start)
        if wants_x:
            dx = add_product(dx, dlogits.t(), weight[part], columns >= V)
        if dweight is not None:
            dweight[part] = weight_gradient(dlogits, x)
        if dbias is not None:
            dbias[part] = dlogits.sum(0, dtype=torch.float32)
        del dlogits  # before the next slab's
    return None if dx is None else dx.to(x.dtype), dweight, None, dbias, None


statistics.register_autograd(_backward, setup_context=_keep)


def mean_loss(statistics: Tensor, targets: Tensor, z_loss: float) -> Tensor:
    """The mean over targets >= 0, 0 if there is none, from the statistics (parts, 3, N) of all columns."""
    lse, losses = cross_entropy.vocabulary_loss(statistics)
    return ((losses + z_loss * lse.square()) * (targets >= 0)).sum() * mean_scale(targets)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, z_loss: float = 0.0
) -> Tensor:
    """As `matmul.linear_cross_entropy`, its twin. Backward may run several times."""
    targets = targets.long().contiguous()
    assert_on_device((targets < len(weight)).all(), "a target beyond the vocabulary")
    return mean_loss(statistics(x, weight, targets, bias, 0)[None], targets, z_loss)
