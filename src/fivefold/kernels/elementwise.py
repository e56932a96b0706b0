"""Norms, gates, GELU, rotary embedding, gradient sums, AdamW: one pass over memory on CPUs (native.c), and PyTorch's
own operations elsewhere. Copies to a device.

Legend: N rows (tokens), D model, F feed-forward, B batch, T sequence, H heads, d head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold.kernels import native
from fivefold.kernels.gpu import registry


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


def add_gradient(total: Tensor, grad: Tensor, first: bool) -> None:
    """total += grad, or total = grad when it is the first of the step. total: flat; grad: any shape and dtype."""
    fp32 = total.dtype == torch.float32
    if fp32 and grad.element_size() == 2 and grad.is_contiguous() and native.usable(grad):
        native.call("accumulate", grad.dtype, total, grad, grad.numel(), int(first))
    elif first:
        total.view(grad.shape).copy_(grad)
    else:
        total.view(grad.shape).add_(grad)


class AdamW(torch.optim.AdamW):
    """PyTorch's AdamW (arXiv 1711.05101), with the same states, and the same results up to rounding. On CPUs one pass
    over memory also scales the gradients and rounds the working weights; so on GPUs where kernels/gpu/adamw.py was
    measured to be faster. PyTorch's fused kernel elsewhere.

    Read by a step in one pass: scale, which multiplies the gradients (None: 1); working, the weights in bf16 that are
    written, by master; found_inf, as PyTorch's fused kernel reads it. Written by it: largest, the largest |weight|
    after the update, NaN if any is; None if it was not one pass.
    """

    scale: Tensor | None = None
    working: Mapping[Tensor, Tensor] = {}
    found_inf: Tensor | None = None
    largest: Tensor | None = None

    @property
    def one_pass(self) -> bool:
        """True if the next step is one pass. Else it knows neither `scale` nor `working`."""
        weights = [p for group in self.param_groups for p in group["params"]]
        return all(_plain(p) and (native.usable(p) or native.in_triton(registry.ADAMW, p)) for p in weights)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.largest = None  # a step that is skipped, too, has none of its own
        if not self.one_pass:
            super().step(closure)
            return
        if not native.usable(self.param_groups[0]["params"][0]):
            self._in_triton()
            return
        if self.found_inf is not None and _value(self.found_inf, 0.0):
            return
        scale = 1.0 if self.scale is None else _value(self.scale, 1.0)
        self.largest = torch.zeros((), dtype=torch.float32)
        weights = [(weight, group) for group in self.param_groups for weight in group["params"]]
        for weight, group in weights:
            if (grad := weight.grad) is None:
                continue
            state = self.state[weight]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
            state["step"] += 1
            number, (a, b), lr = _value(state["step"], 1.0), group["betas"], group["lr"]
            rate, correct = lr / (1 - a**number), (1 - b**number) ** -0.5
            moments = state["exp_avg"], state["exp_avg_sq"]
            assert grad.dtype == weight.dtype
            assert all(_plain(t) for t in (grad, *moments)), "memory of another order"
            native.call(
                "adamw", weight.dtype, weight, grad, *moments, self.working.get(weight), self.largest,
                weight.numel(),
                scale, 1 - a, b, 1 - b, 1 - lr * group["weight_decay"], rate, correct, float(group["eps"]),
            )  # fmt: skip

    def _in_triton(self) -> None:
        """On a GPU, where the host knows neither whether a step is skipped nor how many were."""
        from fivefold.kernels.gpu.adamw import adamw  # with Triton, which takes half a second

        device = self.param_groups[0]["params"][0].device
        self.largest = torch.zeros((), device=device)
        skip = torch.zeros((), device=device) if self.found_inf is None else self.found_inf
        for group in self.param_groups:
            weights = [w for w in group["params"] if w.grad is not None and w.numel()]
            for weight in weights:
                if not self.state[weight]:
                    moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
                    self.state[weight] = {"step": torch.zeros((), device=device), **moments}
            if not weights:
                continue
            torch._foreach_add_([self.state[weight]["step"] for weight in weights], 1 - skip)
            number, (a, b) = self.state[weights[0]]["step"].double(), group["betas"]
            scale = torch.ones_like(number) if self.scale is None else self.scale.double()
            factors = torch.stack([scale, group["lr"] / (1 - a**number), (1 - b**number) ** -0.5]).float()
            constants = [1 - a, b, 1 - b, 1 - group["lr"] * group["weight_decay"], group["eps"]]
            for weight in weights:
                assert _plain(weight.grad), "memory of another order"
                moments = self.state[weight]["exp_avg"], self.state[weight]["exp_avg_sq"]
                working = self.working.get(weight)
                adamw(weight, weight.grad, *moments, working, factors, skip, self.largest, constants)


def _plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous()


def _value(scalar: Tensor, fake: float) -> float:
    """A scalar's value, or `fake` of one that has none."""
    return fake if getattr(scalar, "fake", False) else scalar.item()
