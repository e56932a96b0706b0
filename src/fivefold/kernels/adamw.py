"""AdamW (arXiv 1711.05101) in one pass over memory: beside the update it scales the gradients, rounds the working
weights, and finds the largest weight. On CPUs it is a kernel of native.c. On GPUs it is compiled, over weights that lie
in one buffer: neighbours with one decay are one call. Else PyTorch's fused kernel takes its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from fivefold.kernels import native
from fivefold.kernels.cross_entropy import compiled

ROW = 1024
"""Weights of a row, in which a GPU finds the largest one."""


class AdamW(torch.optim.AdamW):
    """PyTorch's AdamW, with the same states, and the same results up to rounding.

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
        if not all(_plain(p) for p in weights):
            return False
        if all(p.device.type == "cuda" for p in weights):
            return len({p.untyped_storage()._cdata for p in weights}) == 1
        return all(native.usable(p) for p in weights)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.largest = None  # a step that is skipped, too, has none of its own
        if not self.one_pass:
            super().step(closure)
            return
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                (self._compiled if weights[0].is_cuda else self._native)(weights, group)

    def _native(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        if self.found_inf is not None and _value(self.found_inf, 0.0):
            return
        scale = 1.0 if self.scale is None else _value(self.scale, 1.0)
        if self.largest is None:
            self.largest = torch.zeros((), dtype=torch.float32)
        for weight in weights:
            state, grad = self.state[weight], weight.grad
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
            state["step"] += 1
            number, (a, b), lr = _value(state["step"], 1.0), group["betas"], group["lr"]
            rate, correct = lr / (1 - a**number), (1 - b**number) ** -0.5
            moments = state["exp_avg"], state["exp_avg_sq"]
            assert grad is not None
            assert grad.dtype == weight.dtype
            assert all(_plain(t) for t in (grad, *moments)), "memory of another order"
            native.call(
                "adamw", weight.dtype, weight, grad, *moments, self.working.get(weight), self.largest,
                weight.numel(),
                scale, 1 - a, b, 1 - b, 1 - lr * group["weight_decay"], rate, correct, float(group["eps"]),
            )  # fmt: skip

    def _compiled(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        """What differs from step to step stays on the device, so it is compiled once and the host waits for nothing."""
        (a, b), lr, device = group["betas"], group["lr"], weights[0].device
        one = torch.ones((), device=device)
        keep = one if self.found_inf is None else 1 - self.found_inf
        if self.largest is None:
            self.largest = torch.zeros((), device=device)
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["step"] = torch.zeros((), device=device)
        steps = [self.state[weight]["step"] for weight in weights]
        torch._foreach_add_(steps, [keep] * len(steps))  # of one tensor it would ask for the value
        number = steps[0].double()
        rate, correct = lr / (1 - a**number), (1 - b**number) ** -0.5
        scale = one if self.scale is None else self.scale
        factors = torch.stack(
            [scale, keep, 0 * one + 1 - lr * group["weight_decay"], rate.float(), correct.float()]
        )
        rounded = [[self.working[weight] for weight in weights]] if self.working else []
        for run in runs(weights, [weight.grad for weight in weights], *rounded):
            some = weights[run]
            m, v = (self._moments(some, name) for name in ("exp_avg", "exp_avg_sq"))
            working = rounded[0][run] if rounded else None
            update(
                joined(some), joined([weight.grad for weight in some]), m, v, working and joined(working),
                self.largest, factors, 1 - a, 1 - b, float(group["eps"]),
            )  # fmt: skip

    def _moments(self, weights: list[Tensor], name: str) -> Tensor:
        """The states of neighbours as one tensor. New ones, and those of a checkpoint, move into it."""
        states = [self.state[weight].get(name) for weight in weights]
        if None not in states and len([*runs(states)]) == 1:
            return joined(states)
        flat = torch.cat(
            [
                torch.zeros_like(w).view(-1) if s is None else s.view(-1)
                for w, s in zip(weights, states, strict=True)
            ]
        )
        for weight, part in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
            self.state[weight][name] = part.view(weight.shape)
        return flat


def runs(*lists: Sequence[Any]) -> Iterator[slice]:
    """Slices of these lists of tensors in which each tensor of each list lies right behind the one before."""
    first = 0
    for i in range(1, len(lists[0]) + 1):
        if i == len(lists[0]) or not all(_behind(tensors[i - 1], tensors[i]) for tensors in lists):
            yield slice(first, i)
            first = i


def _behind(one: Tensor, other: Tensor) -> bool:
    same = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same and one.storage_offset() + one.numel() == other.storage_offset()


def joined(tensors: Sequence[Any]) -> Tensor:
    """Neighbours in memory as one vector."""
    size = sum(tensor.numel() for tensor in tensors)
    return tensors[0].as_strided((size,), (1,))


def _plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous()


def _value(scalar: Tensor, fake: float) -> float:
    """A scalar's value, or `fake` of one that has none."""
    return fake if getattr(scalar, "fake", False) else scalar.item()


def _update(
    weight: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    working: Tensor | None,
    largest: Tensor,
    factors: Tensor,
    own_a: float,
    own_b: float,
    eps: float,
) -> None:
    scale, keep, decay, rate, correct = factors.unbind()
    d, taken = grad * scale, keep > 0
    new_m = m + own_a * (d - m)
    new_v = v * (1 - own_b) + own_b * d * d
    new = torch.where(taken, weight * decay - rate * new_m / (new_v.sqrt() * correct + eps), weight)
    m.copy_(torch.where(taken, new_m, m))
    v.copy_(torch.where(taken, new_v, v))
    weight.copy_(new)
    if working is not None:
        working.copy_(new)
    largest.copy_(torch.maximum(largest, new.abs().amax(-1).amax()))


@custom_op(
    "fivefold::adamw",
    mutates_args=("weight", "m", "v", "working", "largest"),
    schema="(Tensor(a!) weight, Tensor grad, Tensor(b!) m, Tensor(c!) v, Tensor(d!)? working, Tensor(e!) largest, "
    "Tensor factors, float own_a, float own_b, float eps) -> ()",
)
def update(*given: Any) -> None:
    """`_update` of (n) weights, compiled as rows, so that the largest is found on the way: one pass. A trace sees one
    operator."""
    vectors, rest, size = given[:5], given[5:], given[0].numel()
    whole = size // ROW * ROW
    if whole:
        rows = (None if x is None else x[:whole].view(-1, ROW) for x in vectors)
        compiled(_update, dynamic=True)(*rows, *rest)
    if whole < size:
        plain: Any = _update
        plain(*(None if x is None else x[whole:] for x in vectors), *rest)


@update.register_fake
def _(*given: Any) -> None: ...
