"""Measures one step of this rank: forward and backward of each block, the update, and all messages beside them.

Hooks on the blocks note when a computation begins; it lasts until the next one begins. A block's backward begins when
the gradient of its output is there. `comm/watch.py` notes messages and waits. Without a recorder a step has no hooks.
CPUs only: on a GPU the host runs ahead of what it measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.comm.watch import Watch, watched
from fivefold.models.base import LanguageModel
from fivefold.schedules.overlap import COMPUTE, Span, StepTimeline
from fivefold.step.state import State

Mark = tuple[float, str, str]
"""(time, kind, name) of a computation that begins."""


class Recorder:
    """Records from now until `stop`. All ranks begin together: call it at the same time."""

    def __init__(self, state: State):
        self.rank, self.marks = state.mesh.axis("run").rank, list[Mark]()
        self.handles: list[Any] = []
        for stage in state.parallel.stages:
            self._attach(stage)
        state.mesh.axis("run").barrier()
        self.watch = watched.now = Watch()
        self.mark("other", "start")

    def mark(self, kind: str, name: str) -> None:
        """A computation begins. kind: one of `overlap.KINDS`."""
        self.watch.during = f"{name} {kind}"
        self.marks.append((self.watch.clock(), kind, name))

    def stop(self, step: int) -> StepTimeline:
        """Ends the recording of a step."""
        end = self.watch.clock()
        self.close()
        spans = self.watch.close()
        waits = [span for span in spans if span.lane == COMPUTE]
        messages = sorted((span for span in spans if span.lane != COMPUTE), key=lambda span: span.start)
        computed = sorted([*_computed(self.marks, waits, end), *waits], key=lambda span: span.start)
        return StepTimeline((*computed, *messages), self.rank, step)

    def close(self) -> None:
        """Removes the hooks."""
        watched.now = None
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def _attach(self, stage: nn.Module) -> None:
        if not isinstance(stage, LanguageModel):
            return self._around(stage, "model")
        begin, end, blocks = "embedding", "head", list(stage.blocks.items())
        self._before(stage, begin if stage.first or not blocks else f"blocks.{blocks[0][0]}")
        for number, block in blocks:
            self._around(block, f"blocks.{number}")
        if blocks and stage.first:
            self._on_gradient(blocks[0][1].register_forward_pre_hook, begin, lambda inputs: inputs[0])
        if blocks and stage.last:
            self._after(blocks[-1][1], end)
            self._on_gradient(stage.register_forward_hook, end, lambda inputs, output: output)

    def _around(self, module: nn.Module, name: str) -> None:
        """Notes forward and backward of a module."""
        self._before(module, name)
        self._on_gradient(module.register_forward_hook, name, lambda inputs, output: output)

    def _before(self, module: nn.Module, name: str) -> None:
        self._hook(module.register_forward_pre_hook, lambda *_: self.mark("forward", name), prepend=True)

    def _after(self, module: nn.Module, name: str) -> None:
        self._hook(module.register_forward_hook, lambda *_: self.mark("forward", name))

    def _on_gradient(self, register: Callable[..., Any], name: str, of: Callable[..., Any]) -> None:
        """Notes when the gradient of a tensor is there that `of` finds among a hook's arguments."""

        def hook(module: nn.Module, *arguments: Any) -> None:
            x = of(*arguments)
            if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
                x.register_hook(partial(self._backward, name))

        # Before FSDP2's hooks, which wait for weights, and start to gather others.
        self._hook(register, hook, prepend=True)

    def _backward(self, name: str, gradient: Tensor) -> None:
        if watched.now is self.watch:
            self.mark("backward", name)

    def _hook(self, register: Callable[..., Any], function: Callable[..., None], **options: Any) -> None:
        self.handles.append(register(function, **options))


def _computed(marks: list[Mark], waits: list[Span], end: float) -> Iterator[Span]:
    """What the rank computed between its waits. It waits for one message at a time."""
    ends = [start for start, _, _ in marks[1:]] + [end]
    waits = sorted(waits, key=lambda span: span.start)
    for (start, kind, name), stop in zip(marks, ends, strict=True):
        for wait in waits:
            if wait.end > start and wait.start < stop:
                if start < wait.start:
                    yield Span(COMPUTE, kind, name, start, wait.start)
                start = max(start, wait.end)
        if start < stop:
            yield Span(COMPUTE, kind, name, start, stop)
