"""Counts the numbers of one step by their exponent: weights, activations, and the gradients of both.

Activations are the inputs of the blocks' linear layers and experts; the gradients are those of their outputs. These are
what a matmul of lower precision would round. Each rank counts its own, and the sum over ranks has every number of the
model once. Without a histogram a step has no hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.models.base import LanguageModel
from fivefold.models.mixture import Experts
from fivefold.parallel.tensor import CutLinear
from fivefold.precision.formats import BINS, KINDS, LOWEST, Histogram
from fivefold.sharding.parts import Part, local_shape
from fivefold.step.state import State


def count(x: Tensor) -> Tensor:
    """(BINS) int64: how many elements of any tensor are zero, have each exponent (the whole part of log2 |x|), are not
    finite."""
    x = x.detach().float().reshape(-1)
    exponent = torch.frexp(x).exponent.sub_(
        LOWEST
    )  # of a fraction from 1/2 to 1: bin 0 is that of 2^LOWEST + 1
    exponent = torch.where(x == 0, 0, torch.where(x.isfinite(), exponent, BINS - 1))
    return torch.bincount(exponent, minlength=BINS)


class Counter:
    """Counts from now until `take`. All ranks begin and end together."""

    def __init__(self, state: State):
        self.state, self.mesh = state, state.mesh
        self.once = (
            self.mesh.layout.sp or self.mesh.index("tp") == 0
        )  # counts what tensor ranks have in common
        self.counts = torch.zeros(len(KINDS), BINS, dtype=torch.int64, device=self.mesh.device)
        self.handles: list[Any] = []
        self.forward = False  # recomputation runs in backward, and is not counted again
        self.eager = ExitStack()
        if self.mesh.device.type == "cuda":
            self.eager.enter_context(torch.compiler.set_stance("force_eager"))
        for stage in state.parallel.stages:
            self._attach(stage, state.parts())

    def take_gradients(self) -> None:
        """Counts weights and their gradients, which are whole and not clipped yet: those that this rank owns."""
        for replica in self.state.parallel.replicas:
            for name, part in replica.parts.items():
                if part.owned:
                    self._count("weights", replica.masters[name])
                    if not part.frozen:
                        self._count("weight gradients", replica.gradients[name])

    def take(self) -> Histogram:
        """Ends counting. Returns the counts of all ranks together."""
        for handle in self.handles:
            handle.remove()
        self.eager.close()
        counts = self.mesh.axis("all").all_reduce(self.counts).tolist()
        return Histogram(dict(zip(KINDS, counts, strict=True)))

    def _attach(self, stage: nn.Module, parts: Mapping[str, Part]) -> None:
        self._hook(stage.register_forward_pre_hook, lambda *_: self._run(True), prepend=True)
        self._hook(stage.register_forward_hook, lambda *_: self._run(False))
        blocks = isinstance(stage, LanguageModel)
        for name, module in stage.named_modules():
            if blocks and not name.startswith("blocks."):
                continue
            if isinstance(module, nn.Linear | CutLinear | Experts):
                rows, columns = _cut(parts.get(f"{name}.weight"))
                if columns or self.once:
                    self._hook(module.register_forward_pre_hook, self._input)
                if rows or self.once:
                    self._hook(module.register_forward_hook, self._output)

    def _hook(self, register: Callable[..., Any], function: Callable[..., None], **options: Any) -> None:
        self.handles.append(register(function, **options))

    def _run(self, forward: bool) -> None:
        self.forward = forward

    def _input(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if self.forward and torch.is_grad_enabled():
            self._count("activations", inputs[0])

    def _output(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if self.forward and output.requires_grad:
            output.register_hook(partial(self._count, "activation gradients"))

    def _count(self, kind: str, x: Tensor) -> None:
        self.counts[KINDS.index(kind)] += count(x).to(self.counts.device)


def _cut(part: Part | None) -> tuple[bool, bool]:
    """Does a rank have a part of the output features only, of the input features only?"""
    if part is None or len(part.shape) != 2:
        return False, False
    rows, columns = local_shape(part.computes)
    return rows < part.shape[0], columns < part.shape[1]
