"""Embedding and loss with the vocabulary sharded over the tensor axis (arXiv 1909.08053, section 3).

The loss never gathers logits. For each token a rank sends its largest logit, its sum of exponentials and the target's
logit: three numbers instead of V.

Legend: B batch, T sequence, N tokens, D model, V vocabulary, v = V/tp.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fivefold import kernels
from fivefold.kernels.loss import (
    add_chunk,
    add_z_gradient,
    ahead,
    local_targets,
    mean_scale,
    rows_at_once,
    vocabulary_gradient,
    vocabulary_loss,
    vocabulary_statistics,
)
from fivefold.kernels.private import assert_on_device
from fivefold.models.layers import Output
from fivefold.parallel.sequence import Leave, TensorAxis, enter, join
from fivefold.sharding.regions import LOSS_STATISTICS, STATISTICS


class VocabularyEmbedding(nn.Module):
    """Tokens (B, T) -> (B, T, D), with sp (B, t, D). `weight` has the rows of this rank. Tokens of other ranks give
    zeros here, and the sum over ranks combines them."""

    def __init__(self, embedding: nn.Embedding, axis: TensorAxis):
        super().__init__()
        self.weight, self.axis = embedding.weight, axis

    def forward(self, tokens_BT: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        local_BT = tokens_BT - self.axis.index * rows
        elsewhere_BT = (local_BT < 0) | (local_BT >= rows)
        x_BTD = F.embedding(local_BT.masked_fill_(elsewhere_BT, 0), self.weight)
        return Leave.apply(x_BTD.masked_fill(elsewhere_BT[..., None], 0.0), self.axis)


class VocabularyOutput(Output):
    """Replaces `models.layers.Output`. weight and bias: the rows of this rank. x: whole, or with sp cut along the
    sequence. Targets and logits are always whole."""

    def __init__(self, axis: TensorAxis):
        super().__init__()
        self.axis = axis

    def forward(
        self, x: Tensor, weight_vD: Tensor, targets_BT: Tensor | None, bias_v: Tensor | None = None
    ) -> Tensor:
        if targets_BT is None:
            logits = kernels.linear(enter(x, self.axis), weight_vD, bias_v)
            return join(logits.float(), self.axis)
        targets, axis = targets_BT.long(), self.axis
        if axis.sp:  # targets follow the order of the pieces, which saves copies of x
            axis = replace(axis, ordered=False)
            targets = torch.cat(targets.chunk(axis.size, dim=1))  # (tp B, t)
        z_loss = self.z_loss * self.training
        return _Loss.apply(x, weight_vD, targets, bias_v, axis, torch.is_grad_enabled(), z_loss)


class _Loss(Function):
    """Mean cross-entropy over targets other than -100; see `kernels/loss.py` for one rank's. Forward computes the
    gradients, chunk by chunk. The sum of dx over the ranks runs until backward needs it. Backward frees the gradients,
    so it runs only once."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        axis: TensorAxis,
        grad: bool,
        z_loss: float,
    ) -> Tensor:
        whole = axis.start_whole(x)().contiguous()  # (B, T, D) or (tp B, t, D)
        x_ND, targets_N = whole.flatten(0, 1), targets.flatten()
        N, v = x_ND.shape[0], weight.shape[0]
        assert_on_device((targets_N < v * axis.size).all(), "a target beyond the vocabulary")
        rows, counted, scale = rows_at_once(x_ND, v), targets_N >= 0, mean_scale(targets_N)
        ctx.ahead = ahead()
        made = scale if ctx.ahead is None else scale * ctx.ahead
        needs_x, needs_weight, _, needs_bias = (needed and grad for needed in ctx.needs_input_grad[:4])
        ctx.dx, ctx.gone = None, False
        losses = torch.empty(N, dtype=torch.float32, device=x.device)
        dx_ND = torch.empty_like(x_ND) if needs_x else None
        dweight = dbias = None
        for start in range(0, N, max(1, rows)):
            part = slice(start, start + rows)
            dlogits = _chunk(x_ND[part], weight, targets_N[part], bias, axis, losses[part], made, z_loss)
            if dx_ND is not None:
                dx_ND[part] = kernels.input_gradient(dlogits, weight)
            if dx_ND is not None and start + rows >= N:  # the sum overlaps with the last weight gradient
                ctx.dx = axis.start_sum(dx_ND.view_as(whole))
            if needs_weight:
                dweight = add_chunk(dweight, kernels.weight_gradient(dlogits, x_ND[part]), rows >= N)
            if needs_bias:
                dbias = add_chunk(dbias, dlogits.sum(0), rows >= N)
            del dlogits  # before the next chunk's
        if N == 0:  # no target counts here, but other ranks expect a gradient to sum
            ctx.dx = (lambda: torch.zeros_like(x)) if needs_x else None
            dweight = torch.zeros_like(weight) if needs_weight else None
            dbias = torch.zeros_like(bias) if needs_bias and bias is not None else None
        ctx.save_for_backward(dweight, dbias)
        ctx.dtype = weight.dtype
        return (losses * counted).sum() * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        if ctx.gone:
            raise RuntimeError(
                "a second backward of the same loss: the first has freed its gradients. Compute the loss again"
            )
        factor = grads[0] if ctx.ahead is None else grads[0] / ctx.ahead
        dweight, dbias = ctx.saved_tensors
        found = [None if ctx.dx is None else ctx.dx(), dweight, dbias]
        ctx.dx = None  # the loss keeps this context, and so the gradient, until the next loss
        ctx.gone = True
        dx, dweight, dbias = (None if g is None else (g * factor).to(ctx.dtype) for g in found)
        return dx, dweight, None, dbias, None, None, None


def _chunk(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    axis: TensorAxis,
    losses: Tensor,
    scale: Tensor,
    z_loss: float,
) -> Tensor:
    """Fills losses (n) for a chunk of tokens, x (n, D); returns the gradient of its logits on this rank, (n, v)."""
    first, targets = axis.index * weight.shape[0], targets.contiguous()
    logits = kernels.linear(x, weight, bias)
    mine = vocabulary_statistics(logits, targets, first)
    everyone = axis.axis.run(STATISTICS, mine)  # (tp 3, n)
    lse, loss = vocabulary_loss(everyone.view(axis.size, LOSS_STATISTICS, -1))
    losses.copy_(loss)
    gradient = vocabulary_gradient(logits, targets, lse, first, scale)
    if not z_loss:
        return gradient
    lse = lse * (targets >= 0)
    losses.add_(z_loss * lse.square())
    here, index = local_targets(targets, first, logits.shape[1])
    return add_z_gradient(gradient, index[:, None], here, lse, scale, z_loss)
