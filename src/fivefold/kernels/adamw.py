"""AdamW in one pass over memory on CPUs (native.c): it also scales the gradients and rounds the working weights.
PyTorch's fused kernel elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fivefold.kernels import native


class AdamW(torch.optim.AdamW):
    """PyTorch's AdamW (arXiv 1711.05101), with the same states, and the same results up to rounding.

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
        return all(_plain(p) and native.usable(p) for p in weights)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.largest = None  # a step that is skipped, too, has none of its own
        if not self.one_pass:
            super().step(closure)
            return
        if self.found_inf is not None and _value(self.found_inf, 0.0):
            return
        scale = 1.0 if self.scale is None else _value(self.scale, 1.0)
        self.largest = torch.zeros((), dtype=torch.float32)
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group, scale)

    def _update(self, weight: Tensor, group: Mapping[str, Any], scale: float) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        state["step"] += 1
        number, (a, b), lr = _value(state["step"], 1.0), group["betas"], group["lr"]
        rate, correct = lr / (1 - a**number), (1 - b**number) ** -0.5
        moments, grad = (state["exp_avg"], state["exp_avg_sq"]), weight.grad
        assert grad is not None
        assert grad.dtype == weight.dtype
        assert all(_plain(t) for t in (grad, *moments)), "memory of another order"
        assert self.largest is not None
        native.call(
            "adamw", weight.dtype, weight, grad, *moments, self.working.get(weight), self.largest,
            weight.numel(),
            scale, 1 - a, b, 1 - b, 1 - lr * group["weight_decay"], rate, correct, float(group["eps"]),
        )  # fmt: skip


def _plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous()


def _value(scalar: Tensor, fake: float) -> float:
    """A scalar's value, or `fake` of one that has none."""
    return fake if getattr(scalar, "fake", False) else scalar.item()
