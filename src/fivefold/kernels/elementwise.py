"""Norms, gates, GELU, rotary embedding, sums of experts' rows, gradient sums, AdamW: one pass over memory on CPUs
(native.c), and PyTorch's own operations elsewhere. Copies to a device.

Legend: N rows (tokens), D model, F feed-forward, B batch, T sequence, H heads, d head size.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold.kernels import native


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device, if it is not there already. The host waits for no GPU, which reads pinned memory by
    itself."""
    if device.type == "cuda" and host.device.type == "cpu":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm (arXiv 1607.06450) over the last dim of x (..., D), computed in fp32:
    (x - mean) / sqrt(variance + eps) * weight + bias. Without a bias RMSNorm (arXiv 1910.07467):
    x / sqrt(mean(x^2) + eps) * weight."""
    return add_norm(x, None, weight, bias, eps)[1]


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(x + residual, norm(x + residual)): the residual stream and its norm in one pass. All (..., D)."""
    if native.usable(*(t for t in (x, residual, weight, bias) if t is not None)):
        return _Norm.apply(x, residual, weight, bias, eps)
    total = x if residual is None else x + residual
    if bias is not None:
        return total, F.layer_norm(total, x.shape[-1:], weight, bias, eps)
    return total, (F.rms_norm(total.float(), x.shape[-1:], eps=eps) * weight.float()).to(x.dtype)


class _Norm(Function):
    """(x, residual or None, weight (D), bias (D) or None) -> (x + residual, its norm): LayerNorm with a bias, else
    RMSNorm. Statistics of a row: its mean, if there is a bias, and the factor that it is multiplied by."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ):
        weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
        assert all(w is None or w.shape == x.shape[-1:] for w in (weight, bias)), (
            "one weight and bias a column"
        )
        assert residual is None or residual.shape == x.shape
        x = x.contiguous()
        total = x if residual is None else torch.empty_like(x)
        residual = None if residual is None else residual.contiguous()
        out, rows, dim = torch.empty_like(x), x.numel() // x.shape[-1], x.shape[-1]
        statistics = torch.empty(rows, 1 if bias is None else 2, dtype=torch.float32)
        ctx.added = residual is not None
        native.call(
            "norm_forward", x.dtype, x, residual, weight, bias, total, out, statistics, rows, dim, float(eps)
        )
        ctx.save_for_backward(total, weight, statistics)
        ctx.set_materialize_grads(False)
        return (None if residual is None else total), out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None):
        carry, dout = grads
        x, weight, statistics = ctx.saved_tensors
        if dout is None:  # only the sum was used
            return carry, carry if ctx.added else None, None, None, None
        (rows, count), dim, threads = statistics.shape, x.shape[-1], torch.get_num_threads()
        dx, gradients = torch.empty_like(x), torch.empty((2, dim) if count == 2 else dim)
        scratch = torch.empty(threads * count * dim)
        carry = None if carry is None else carry.contiguous()
        dout = dout.contiguous()
        native.call(
            "norm_backward", x.dtype, dout, x, weight, statistics, carry, dx, gradients, scratch, count, rows, dim,
            threads,
        )  # fmt: skip
        gradients = gradients.to(weight.dtype)
        dweight, dbias = gradients.unbind() if count == 2 else (gradients, None)
        return dx, dx if ctx.added else None, dweight, dbias, None


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (arXiv 2002.05202). gate_up (..., 2F): the gate's F columns, then up's. Returns (..., F)."""
    if native.usable(gate_up):
        return _SwiGLU.apply(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        assert gate_up.shape[-1] % 2 == 0
        gate_up = gate_up.contiguous()
        out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        width = out.shape[-1]
        native.call("swiglu_forward", out.dtype, gate_up, out, out.numel() // width, width)
        ctx.save_for_backward(gate_up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        (gate_up,), dout = ctx.saved_tensors, grads[0].contiguous()
        dgate_up, width = torch.empty_like(gate_up), dout.shape[-1]
        native.call("swiglu_backward", dout.dtype, dout, gate_up, dgate_up, dout.numel() // width, width)
        return dgate_up


def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up by GELU's tanh form (arXiv 2002.05202). gate_up (..., 2F): as in `swiglu`. Returns (..., F)."""
    return _GeGLU.apply(gate_up)


class _GeGLU(Function):
    """Keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        ctx.save_for_backward(gate_up)
        return F.gelu(gate, approximate="tanh") * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        gate, up = ctx.saved_tensors[0].chunk(2, dim=-1)
        dgate = torch.ops.aten.gelu_backward(grads[0] * up, gate, approximate="tanh")
        return torch.cat((dgate, grads[0] * F.gelu(gate, approximate="tanh")), dim=-1)


def gated(x: Tensor, gate: Tensor, silu: bool = False) -> Tensor:
    """x * sigmoid(gate), or with silu x * gate * sigmoid(gate). Both of the same shape."""
    return _Gated.apply(x, gate, silu)


class _Gated(Function):
    """Keeps its inputs alone. Computed in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, silu: bool) -> Tensor:
        ctx.save_for_backward(x, gate)
        ctx.silu = silu
        wide = gate.float()
        return (x * (F.silu(wide) if silu else wide.sigmoid())).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        x, gate = ctx.saved_tensors
        wide = gate.float()
        share = wide.sigmoid()
        factor = wide * share if ctx.silu else share
        slope = share * (1 - share)
        slope = share + wide * slope if ctx.silu else slope
        return (grads[0] * factor).to(x.dtype), (grads[0] * x * slope).to(gate.dtype), None


def clamped_swiglu(gate_up: Tensor, gain: float, limit: float) -> Tensor:
    """gate * sigmoid(gain * gate) * (up + 1), of a gate up to `limit` and up within +-`limit` (gpt-oss, arXiv
    2508.10925). gate_up (..., 2F): as in `swiglu`. Returns (..., F)."""
    return _ClampedSwiGLU.apply(gate_up, gain, limit)


class _ClampedSwiGLU(Function):
    """Keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, gain: float, limit: float) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.gain, ctx.limit = gain, limit
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=limit)
        return (gate * gain).sigmoid_().mul_(gate).mul_(up.clamp(-limit, limit).add_(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        (gate_up,), gain, limit = ctx.saved_tensors, ctx.gain, ctx.limit
        dgate_up = torch.empty_like(gate_up)
        (raw_gate, raw_up), (dgate, dup) = (x.chunk(2, dim=-1) for x in (gate_up, dgate_up))
        gate = raw_gate.clamp(max=limit)
        share = (gate * gain).sigmoid_()
        dup.copy_((grads[0] * share).mul_(gate).mul_(raw_up.abs() <= limit))
        slope = (1 - share).mul_(gate).mul_(gain).add_(1).mul_(share).mul_(raw_gate <= limit)
        dgate.copy_(slope.mul_(raw_up.clamp(-limit, limit).add_(1)).mul_(grads[0]))
        return dgate_up, None, None


def gelu(x: Tensor, approximate: Literal["tanh", "none"]) -> Tensor:
    """GELU (arXiv 1606.08415), by its tanh form or exact."""
    if native.usable(x):
        return _GELU.apply(x, approximate == "none")
    return F.gelu(x, approximate=approximate)


class _GELU(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exact: bool) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        native.call("gelu_forward", x.dtype, x, out, x.numel(), int(exact))
        ctx.save_for_backward(x)
        ctx.exact = exact
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        (x,), dout = ctx.saved_tensors, grads[0].contiguous()
        dx = torch.empty_like(x)
        native.call("gelu_backward", x.dtype, dout, x, dx, x.numel(), int(ctx.exact))
        return dx, None


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864), halves convention: features i and i + d/2 rotate together.

    x (B, T, H, d); cos, sin (T, d/2) in fp32. Computed in fp32, returned in x's dtype.
    """
    a, b = x.float().chunk(2, dim=-1)
    c, s = cos[:, None, :], sin[:, None, :]  # (T, 1, d/2)
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(x.dtype)


def sum_rows(rows_MD: Tensor, place_NK: Tensor, weights_NK: Tensor | None, drops: bool) -> Tensor:
    """The weighted sum of each token's rows, which experts have computed (N, D): one bag of K of the M rows per token,
    summed in the same order in every run. drops: some places may be M, which counts as zero."""
    if drops:
        rows_MD = torch.cat([rows_MD, rows_MD.new_zeros(1, rows_MD.shape[1])])
    return F.embedding_bag(place_NK, rows_MD, mode="sum", per_sample_weights=weights_NK)


def spread(dout_ND: Tensor, rows_MD: Tensor, weights_NK: Tensor, order_M: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of rows and weights, given that of the sum. order: the slot of each row. Slot s of token n has
    index s N + n; slot N K is nobody's."""
    dout_MD = dout_ND.index_select(0, order_M % len(dout_ND))
    dslots = torch.zeros(weights_NK.numel() + 1, dtype=torch.float32, device=rows_MD.device)
    dslots[order_M] = (dout_MD * rows_MD).sum(-1, dtype=torch.float32)
    dweights = dslots[:-1].view(weights_NK.shape[::-1]).t().to(weights_NK.dtype)
    slot_weights_M = F.pad(weights_NK.t().reshape(-1), (0, 1))[order_M]  # 0 for rows of nobody
    return dout_MD.mul_(slot_weights_M[:, None]), dweights


def add_gradient(total: Tensor, grad: Tensor, first: bool) -> None:
    """total += grad, or total = grad when it is the first of the step. total: flat; grad: any shape and dtype."""
    fp32 = total.dtype == torch.float32
    if fp32 and grad.element_size() == 2 and grad.is_contiguous() and native.usable(grad):
        native.call("accumulate", grad.dtype, total, grad, grad.numel(), int(first))
    elif first:
        total.view(grad.shape).copy_(grad)
    else:
        total.view(grad.shape).add_(grad)
