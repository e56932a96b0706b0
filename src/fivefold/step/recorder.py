"""Looks into one step of this rank, with hooks that a step has not otherwise: `Recorder` measures when it computes and
sends, `Counter` counts its numbers by their exponent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fivefold.comm.progress import Watch, progress
from fivefold.kernels.rounded import RoundedMatmuls, round_tiles
from fivefold.models.base import LanguageModel
from fivefold.models.mixture import Assignment, Experts
from fivefold.observe.number_formats import BINS, KINDS, LOWEST, Histogram
from fivefold.parallel.tensor import CutLinear
from fivefold.precision.fp8 import BLOCK
from fivefold.schedules.timelines import COMPUTE, Span, StepTimeline
from fivefold.sharding.parts import Part, local_shape
from fivefold.step.state import State

Mark = tuple[float, str, str]
"""(time, kind, name) of a computation that begins."""


class Recorder:
    """Measures forward and backward of each block, the update, and all messages beside them, from now until `stop`. All
    ranks begin together: call it at the same time.

    Hooks on the blocks note when a computation begins; it lasts until the next one begins. A block's backward begins
    when the gradient of its output is there. `comm/progress.py` notes messages and waits, and what threads of offload
    read, write and update. CPUs only: on a GPU the host runs ahead of what it measures.
    """

    def __init__(self, state: State):
        self._handles: list[RemovableHandle] = []
        self.rank, self.marks = state.mesh.axis("run").rank, list[Mark]()
        for stage in state.parallel.stages:
            self._attach(stage)
        state.mesh.axis("run").barrier()
        assert state.mesh.device.type == "cpu", "`Watch.follow` waits in a thread: no wait for NCCL's stream"
        self.watch = progress.watch = Watch()
        self.mark("other", "start")

    def mark(self, kind: str, name: str) -> None:
        """A computation begins. kind: one of `timelines.KINDS`."""
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
        progress.watch = None
        for handle in self._handles:
            handle.remove()

    def _attach(self, stage: nn.Module) -> None:
        if not isinstance(stage, LanguageModel):
            return self._around(stage, "model")
        begin, end, blocks = "embedding", "head", list(stage.blocks.items())
        if not blocks:  # the embedding or the head alone
            return self._around(stage, end if stage.last else begin)
        self._before(stage, begin if stage.first else f"blocks.{blocks[0][0]}")
        for number, block in blocks:
            self._around(block, f"blocks.{number}")
        if stage.first:
            self._on_gradient(blocks[0][1].register_forward_pre_hook, begin, lambda inputs: inputs[0])
        if stage.last:
            mark = lambda *_: self.mark("forward", end)  # noqa: E731
            self._handles.append(blocks[-1][1].register_forward_hook(mark))
            self._on_gradient(stage.register_forward_hook, end, lambda inputs, output: output)

    def _around(self, module: nn.Module, name: str) -> None:
        """Notes forward and backward of a module."""
        self._before(module, name)
        self._on_gradient(module.register_forward_hook, name, lambda inputs, output: output)

    def _before(self, module: nn.Module, name: str) -> None:
        mark = lambda *_: self.mark("forward", name)  # noqa: E731
        self._handles.append(module.register_forward_pre_hook(mark, prepend=True))

    def _on_gradient(self, register: Callable[..., Any], name: str, of: Callable[..., Any]) -> None:
        """Notes when the gradient of a tensor is there that `of` finds among a hook's arguments."""

        def hook(module: nn.Module, *arguments: Any) -> None:
            x = of(*arguments)
            if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
                x.register_hook(
                    lambda _: self.mark("backward", name) if progress.watch is self.watch else None
                )

        # Before FSDP2's hooks, which wait for weights, and start to gather others.
        self._handles.append(register(hook, prepend=True))


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


def count(x: Tensor) -> Tensor:
    """(BINS) int64: how many elements of any tensor are zero, have each exponent (the whole part of log2 |x|), are not
    finite."""
    x = x.detach().float().reshape(-1)
    # Of a fraction from 1/2 to 1: bin 0 is that of 2^LOWEST + 1
    exponent = torch.frexp(x).exponent.sub_(LOWEST)
    exponent = torch.where(x == 0, 0, torch.where(x.isfinite(), exponent, BINS - 1))
    return torch.bincount(exponent, minlength=BINS)


class Counter:
    """Counts the numbers of a step by their exponent, from now until `take`: weights, activations, and the gradients of
    both. All ranks begin and end together.

    Activations are the inputs of the blocks' linear layers and experts; the gradients are those of their outputs. They
    are what a matmul of lower precision would round. Each rank counts its own, and the sum over ranks has every number
    of the model once.
    """

    def __init__(self, state: State):
        self._handles: list[RemovableHandle] = []
        self.state, self.mesh = state, state.mesh
        # Counts what tensor ranks have in common
        self.once = self.mesh.layout.sp or self.mesh.index("tp") == 0
        self.counts = torch.zeros(len(KINDS), BINS, dtype=torch.int64, device=self.mesh.device)
        self.forward = False  # recomputation runs in backward, and is not counted again
        self.eager = ExitStack()
        if self.mesh.device.type == "cuda":
            self.eager.enter_context(torch.compiler.set_stance("force_eager"))
        for stage in state.parallel.stages:
            self._attach(stage, state.parts())

    def take(self) -> Histogram:
        """Ends counting, with weights and their gradients, which are whole and not clipped yet: those that this rank
        owns. Returns the counts of all ranks together."""
        for replica in self.state.parallel.replicas:
            for name, part in replica.parts.items():
                if part.owned:
                    self._count("weights", replica.masters[name])
                    if not part.frozen:
                        self._count("weight gradients", replica.gradients[name])
        for handle in self._handles:
            handle.remove()
        self.eager.close()
        counts = self.mesh.axis("all").all_reduce(self.counts).tolist()
        return Histogram(dict(zip(KINDS, counts, strict=True)))

    def _attach(self, stage: nn.Module, parts: Mapping[str, Part]) -> None:
        set_forward, hooks = partial(setattr, self, "forward"), self._handles
        hooks.append(stage.register_forward_pre_hook(lambda *_: set_forward(True), prepend=True))
        hooks.append(stage.register_forward_hook(lambda *_: set_forward(False)))
        blocks = isinstance(stage, LanguageModel)
        for name, module in stage.named_modules():
            if blocks and not name.startswith("blocks."):
                continue
            if isinstance(module, nn.Linear | CutLinear | Experts):
                part = parts.get(f"{name}.weight")
                rows = columns = False  # has this rank a part of the output, of the input features only?
                if part is not None and len(part.shape) == 2:
                    local = local_shape(part.computes)
                    rows, columns = local[0] < part.shape[0], local[1] < part.shape[1]
                if isinstance(module, Experts):
                    if self.once:
                        self._routed(module)
                    continue
                if columns or self.once:
                    hooks.append(module.register_forward_pre_hook(self._input))
                if rows or self.once:
                    hooks.append(module.register_forward_hook(self._output))

    def _input(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if self.forward and torch.is_grad_enabled():
            self._count("activations", inputs[0])

    def _routed(self, experts: Experts) -> None:
        """Counts rows that are sent to experts, as they arrive, and the gradients of their results. Rows that fill up
        messages or matmuls are nobody's numbers."""
        exchange, begin, latest = experts.exchange, experts.exchange.begin, list[Tensor]()

        def counted(x_ND: Tensor, way: Assignment, how: RoundedMatmuls | None = None) -> Any:
            latest[:] = [way.order_M < way.place_NK.numel()]
            rows = x_ND.detach()[way.tokens_M[latest[0]]]
            if how is not None and how.inputs is not None:
                rows = round_tiles(rows, 1, BLOCK, how.inputs)
            self._input(experts, (rows,))
            return begin(x_ND, way, how)

        def returned(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            own = latest[0]
            if self.forward and output.requires_grad:
                output.register_hook(lambda grad: self._count("activation gradients", grad[own]))

        exchange.begin = counted
        self.eager.callback(setattr, exchange, "begin", begin)
        self._handles.append(experts.register_forward_hook(returned))

    def _output(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if self.forward and output.requires_grad:
            output.register_hook(partial(self._count, "activation gradients"))

    def _count(self, kind: str, x: Tensor) -> None:
        self.counts[KINDS.index(kind)] += count(x).to(self.counts.device)
