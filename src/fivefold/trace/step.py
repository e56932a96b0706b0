"""Traces the trainer's own step on one rank of a layout with any number of ranks, in one process, without its memory.

PyTorch's fake process group sends nothing, and fake tensors have shapes but no bytes. Memory, messages and FLOPs
match those of a rank that trains on CPUs, to the byte (tests/test_trace.py).

Some shapes depend on values. The trace assumes that gradients are finite, all targets count, experts share tokens
evenly, and batches mask their usual number of tokens.
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.kernels.fake import CPU, Fake, FakeMode, is_mask
from fivefold.launch.ranks import Ranks, threads_of
from fivefold.models import predicted
from fivefold.models.card import card_of
from fivefold.models.section import ModelSection
from fivefold.optim.updater import Updater
from fivefold.parallel.expert import AllToAll
from fivefold.parallel.mesh import Mesh, Microbatch, take
from fivefold.parallel.offload.activations import Activations
from fivefold.recipe import Recipe
from fivefold.sharding.layout import Layout
from fivefold.step.state import State, build_state
from fivefold.step.step import forward_backward, take_step
from fivefold.trace import private, standins
from fivefold.trace.memory import Peak, Tracker, states_of, tensors_in
from fivefold.trace.standins import fake_files
from fivefold.trace.traffic import Collectives, flops_of

aten = torch.ops.aten
SYNCS = (
    aten._local_scalar_dense.default, aten.item.default, aten.nonzero.default, aten.masked_select.default,
    aten.bincount.default, aten._unique2.default, aten._linalg_eigh.default,
)  # fmt: skip
COPIES = (aten._to_copy.default, aten.copy_.default)
MASKED = (
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
)  # these count as syncs only where a mask chooses
operators: set[str] = set()
"""The operators that have run on a GPU in traces of this process."""
PACKAGE = str(Path(__file__).parents[1]) + os.sep
TRACING = (PACKAGE + "trace" + os.sep, PACKAGE + os.path.join("kernels", "fake.py"))


@dataclass(frozen=True)
class Traced:
    """One step of one rank. sent: {(operation, axis): (calls, bytes)}, as `traffic.Collectives` counts them. syncs:
    {(operation, "file:line"): times} that the host waits for a value; on a GPU it waits for all work queued before."""

    memory: Peak
    sent: dict[tuple[str, str], tuple[int, int]]
    flops: int
    syncs: dict[tuple[str, str], int] = field(default_factory=dict, compare=False)


def trace(recipe: Recipe, rank: int, microbatches: int, device: torch.device = CPU) -> Traced:
    """Traces a step of a resolved recipe on a rank of its layout. It is the second step: the first one creates the
    optimizer's states. Of several sites it is one that ends with an outer step (`Sites.traced`). device: another than
    the CPU only in the process of worker.py."""
    return probe(recipe, rank, microbatches, device).found()


def probe(
    recipe: Recipe, rank: int, microbatches: int, device: torch.device = CPU, first: bool = False
) -> Probe:
    """The instrument behind `trace`. first: traces the run's first step instead."""
    layout = Layout.from_recipe(recipe.layout)
    fake = FakeMode(partial(_chosen, recipe.model, recipe.model.seq_len // layout.cp))
    with ExitStack() as stack:
        ranks = stack.enter_context(_one_of(rank, layout.ranks, device))
        if device != CPU:
            stack.enter_context(standins.a_gpu())
            stack.enter_context(standins.Creating(fake))
        stack.enter_context(fake_files())
        state = build_state(recipe, ranks, memory=fake)
        state.go_to(layout.compress_after or 0)
        try:
            _share_evenly(state)
            with fake:
                if not first:
                    _prime(state)
                    state.step = recipe.sites.traced(recipe.train.steps or 1) - 1
                _update_always(state, first)
                batch = _batch(recipe, state.mesh, microbatches)
                if isinstance(state.parallel.activations, Activations) and not first:
                    forward_backward(
                        state, batch, recipe.train.seed
                    )  # makes the host's buffers, as a first step does
                with Probe(state, fake) as found:
                    done = take_step(state, recipe, batch, inspect=found.begin_update)
                    assert done.loss, "read as a loop does"
        finally:
            state.parallel.close()
    return found


def _prime(state: State) -> None:
    """Creates the optimizer's states, as a first step does. The loss scale becomes fake like all else."""
    for replica in state.parallel.replicas:
        gradients = {name: torch.zeros_like(master) for name, master in replica.masters.items()}
        if (
            none := not replica.gradients
        ):  # as FSDP2 has them before a backward; a streamed update reads them there
            replica.gradients.update(gradients)
        replica.updater.step(gradients, 0.0)
        if none:
            replica.gradients.clear()
        for master in replica.masters.values():
            master.grad = None
    if state.outer is not None:
        state.outer.prime()
    if (scaling := state.loss_scale) is not None:
        scaling.values = torch.empty(3, dtype=scaling.values.dtype, device=scaling.values.device)


def _update_always(state: State, first: bool) -> None:
    """Updates although a trace cannot answer whether the host skips the update: the first one, and each that is
    streamed."""

    def always(
        updater: Updater, step: Callable[..., None], gradients: Any, lr: float, scale: Any, skip: Any
    ) -> None:
        step(gradients, lr, scale, _No(skip) if updater.streamed else None)

    for replica in state.parallel.replicas:
        updater = replica.updater
        if first or updater.streamed:
            updater.step = partial(always, updater, updater.step)  # pyright: ignore[reportAttributeAccessIssue]


class _No:
    """A scalar that the host reads, which waits, and finds to be 0."""

    def __init__(self, scalar: Tensor) -> None:
        self.scalar = scalar

    def item(self) -> float:
        return 0.0 * self.scalar.item()


class Probe(Tracker):
    """Counts memory, messages and FLOPs of a step on fake tensors in one dispatch mode instead of three, and executes
    the operations itself."""

    def __init__(self, state: State, fake: FakeMode) -> None:
        super().__init__(states_of(state), state.mesh.device.type, host=state.parallel.disk is not None)
        self.fake, self.sent, self.flops = fake, Collectives(state.mesh), 0
        self.syncs: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Probe:
        self.sent.listen()
        standins.waits.append(self._waited)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        standins.waits.remove(self._waited)
        self.sent.leave()

    def execute(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self.sent.see(func, args)
        if func.namespace == "c10d" and any(t.device.type != self.on for t in tensors_in(args)):
            raise RuntimeError(f"{func} does not send from host memory")
        if self._waits(func, args, kwargs):
            self._waited(_name(func))
        out = self.fake.__torch_dispatch__(func, types, args, kwargs)
        if self.on != "cpu" and func.namespace == "aten" and (type(out) is not Fake or out.on != CPU):
            operators.add(func.name())
        if out is NotImplemented:  # FakeMode leaves it to the tensors' class
            out = func(*args, **kwargs)
        self.flops += flops_of(func, args, kwargs, out)
        return out

    def _waits(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """True if the host waits for the device: it needs a value, or copies to or from the CPU and waits for it."""
        if func in COPIES:
            if self.on == "cpu":
                return False
            there = kwargs.get("device") if func is aten._to_copy.default else args[1].device
            waits = not (
                kwargs.get("non_blocking") or (func is aten.copy_.default and len(args) > 2 and args[2])
            )
            return there is not None and there.type != args[0].device.type and waits
        if func is aten.repeat_interleave.Tensor:
            return kwargs.get("output_size") is None
        if func in MASKED:
            return is_mask(args[1])
        return func in SYNCS and args[0].device.type == self.on

    def _waited(self, name: str) -> None:
        self.syncs[name, _caller()] += 1

    def found(self) -> Traced:
        sent = {key: (calls, size) for key, (calls, size) in sorted(self.sent.found.items())}
        return Traced(self.peak(), sent, self.flops, dict(sorted(self.syncs.items())))


def _name(func: Any) -> str:
    return "item" if func is aten._local_scalar_dense.default else func.__name__.split(".")[0].lstrip("_")


def _caller() -> str:
    """File and line of the innermost code of the package that runs an operation, the tracing code left out."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE) and not name.startswith(TRACING):
            return f"{name[len(PACKAGE) :]}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd:0"


@contextmanager
def _one_of(rank: int, world: int, device: torch.device) -> Iterator[Ranks]:
    """Acts as one of `world` ranks that share this machine; the others do not exist."""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads_of(world))  # some kernels have workspace per thread
    hook = sys.excepthook  # a process group replaces it by one that starts every line with [rankN]
    if world > 1:
        dist.init_process_group("fake", store=private.FakeStore(), rank=rank, world_size=world)
    try:
        yield Ranks(rank, world, rank, world, device)
    finally:
        torch.set_num_threads(threads)
        sys.excepthook = hook
        if world > 1:
            dist.destroy_process_group()


def _batch(recipe: Recipe, mesh: Mesh, microbatches: int) -> list[Microbatch]:
    shape = recipe.train.microbatch_size or 1, recipe.model.seq_len

    def tokens() -> Tensor:
        return take(torch.empty(shape, dtype=torch.int64, device=mesh.device), mesh)

    return [Microbatch(tokens(), tokens()) for _ in range(microbatches)]


def _share_evenly(state: State) -> None:
    """Makes every rank send each other rank as many rows as it gets from it."""
    for stage in state.parallel.stages:
        for module in stage.modules():
            if isinstance(module, AllToAll):
                module.splits = _even  # pyright: ignore[reportAttributeAccessIssue]


def _even(rows_2CG: Tensor, rows: int) -> list[list[list[int]]]:
    _, chunks, ranks = rows_2CG.shape
    rows_2CG.tolist()  # as the method that this replaces does: a host sync
    each = [rows * (i + 1) // chunks - rows * i // chunks for i in range(chunks)]
    return [[[some // ranks + (index < some % ranks) for index in range(ranks)] for some in each]] * 2


def _chosen(model: ModelSection, T: int, mask: Tensor) -> int:
    """Number of elements that a mask selects: masked tokens (B T), T of each sequence, or slots (M) that fit their
    experts' capacity."""
    if (objective := card_of(model).objective) == "mlm":
        return mask.numel() // T * predicted(objective, T)
    assert model.experts, "nothing else is chosen by its values"
    room = math.ceil(model.capacity_factor * mask.numel() / model.experts)
    return min(mask.numel(), model.experts * room)
