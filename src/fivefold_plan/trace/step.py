"""Traces the trainer's own step on one rank of a layout with any number of ranks, in one process, without its memory.

PyTorch's fake process group sends nothing, and fake tensors have shapes but no bytes. Memory, messages and FLOPs
match those of a rank that trains on CPUs, to the byte (tests/test_trace.py).

Below it stand-ins for what a step asks of `torch.cuda`, which PyTorch without a GPU refuses. Nothing is queued in a
trace. Streams and events note what a GPU would run before what (streams.py), and races.py finds what has no order.
Attention calls the kernel that PyTorch picks on NVIDIA GPUs from Ampere on. Without a GPU it would pick another one.

Some shapes depend on values. The trace assumes that gradients are finite, all targets count, experts share tokens
evenly, and batches mask their usual number of tokens.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Work
from torch._subclasses import fake_tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes

from fivefold.launch.ranks import Ranks, threads_of
from fivefold.models import predicted
from fivefold.models.card import card_of
from fivefold.models.section import ModelSection, expert_capacity, known
from fivefold.optim.updater import Updater
from fivefold.parallel.expert import AllToAll
from fivefold.parallel.mesh import Mesh, Microbatch, divided
from fivefold.parallel.offload import disk
from fivefold.parallel.offload.activations import Activations
from fivefold.recipe import Recipe
from fivefold.sharding.layout import Layout
from fivefold.step.state import State, build_state
from fivefold.step.step import forward_backward, take_step
from fivefold_plan.trace.blocks import Blocks, inside_graphs, keep_as_compiled, outside_graphs
from fivefold_plan.trace.fake import COPIES, CPU, Fake, FakeMode, is_mask, non_blocking
from fivefold_plan.trace.memory import OWN, Peak, Tracker, states_of, tensors_in
from fivefold_plan.trace.races import Races
from fivefold_plan.trace.streams import Event, Streams, place
from fivefold_plan.trace.traffic import Collectives, flops_of

aten = torch.ops.aten
SYNCS = (
    aten._local_scalar_dense.default, aten.item.default, aten.nonzero.default, aten.masked_select.default,
    aten.bincount.default, aten._unique2.default, aten._linalg_eigh.default,
)  # fmt: skip
MASKED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
"""These count as syncs only where a mask chooses."""
operators: set[str] = set()
"""The operators that have run on a GPU in traces of this process."""
DOCUMENTS = 3
"""In each sequence of a trace. They are equally long, up to a token, so the FLOPs of attention follow from shapes. No
part of a sequence that a rank of context parallelism may have ends where one does: parts are powers of two."""
DEVICE = torch.device("cuda", 0)
CAPABILITY = (9, 0)
"""Of the GPU that the trace stands for: an H100's. "auto" is bf16 from (8, 0) on."""


@dataclass(frozen=True)
class Traced:
    """One step of one rank. sent: {(operation, axis): (calls, bytes)}, as `traffic.Collectives` counts them. syncs:
    {(operation, "file:line"): times} that the host waits for a value; on a GPU it waits for all work queued before.
    races: {what `Races` has found: times}."""

    memory: Peak
    sent: dict[tuple[str, str], tuple[int, int]]
    flops: int
    syncs: dict[tuple[str, str], int] = field(default_factory=dict, compare=False)
    races: dict[str, int] = field(default_factory=dict, compare=False)


def trace(
    recipe: Recipe, rank: int, microbatches: int, device: torch.device = CPU, blocks: Blocks | None = None
) -> Traced:
    """Traces a step of a resolved recipe on a rank of its layout. It is the second step: the first one creates the
    optimizer's states. Of several replica groups it is one that ends with an outer step (`ReplicaGroups.traced`).
    device: another than the CPU only in a process of gpu.py. blocks: what `compiled.blocks` found; None: no block is
    compiled."""
    return probe(recipe, rank, microbatches, device, blocks=blocks).found()


def probe(
    recipe: Recipe,
    rank: int,
    microbatches: int,
    device: torch.device = CPU,
    first: bool = False,
    work: Callable[[State, list[Microbatch]], object] | None = None,
    blocks: Blocks | None = None,
) -> Probe:
    """The instrument behind `trace`. first: traces the run's first step instead. work: what is traced instead of a
    step, such as a validation; given the state before the step and the step's microbatches."""
    recipe = recipe.model_copy(update={"model": recipe.model.grown})
    layout = Layout.from_recipe(recipe.layout)
    fake = FakeMode(partial(chosen_elements, recipe.model, recipe.model.seq_len // layout.cp))
    with ExitStack() as stack:
        ranks = stack.enter_context(one_of(rank, layout.ranks, device))
        races = None
        if device != CPU:
            races = stack.enter_context(a_gpu())
            stack.enter_context(Creating(fake))
            replaced(stack, torch.compiler, "disable", outside_graphs)
            replaced(stack, torch, "compile", inside_graphs)
        replaced(stack, disk, "File", FakeFile)
        state = build_state(recipe, ranks, memory=fake)
        instrument = Probe(state, fake, races)
        if blocks:
            keep_as_compiled(state.parallel.stages, recipe, blocks, instrument)
        state.go_to(layout.compress_after or 0)
        try:
            for stage in state.parallel.stages:
                share_evenly(stage)
            with fake:
                if not first:
                    _prime(state)
                    state.step = recipe.replica_groups.traced(recipe.train.steps or 1) - 1
                for replica in state.parallel.replicas:
                    updater = replica.updater
                    if first or updater.streamed:
                        updater.step = partial(_always, updater, updater.step)  # pyright: ignore[reportAttributeAccessIssue]
                batches = [[microbatch(recipe, state.mesh) for _ in range(microbatches)] for _ in range(2)]
                if isinstance(state.parallel.activations, Activations) and not first:
                    forward_backward(state, batches[0], recipe.train.seed)  # makes the host's buffers
                with instrument:
                    if work is not None:
                        work(state, batches[1])
                    else:
                        done = take_step(state, recipe, batches[1], inspect=instrument.begin_update)
                        assert done.loss, "read as a loop does"
        finally:
            state.parallel.close()
    return instrument


def microbatch(recipe: Recipe, mesh: Mesh) -> Microbatch:
    """As the trainer's, with DOCUMENTS in each sequence if attention sees them."""
    B, T = recipe.train.microbatch_size or 1, recipe.model.seq_len
    inputs, targets = (torch.empty(B, T, dtype=torch.int64, device=mesh.device) for _ in range(2))
    return divided(inputs, targets, firsts(B, T) if recipe.data.document_masks else None, mesh)


def firsts(B: int, T: int) -> np.ndarray:
    """The column at which the document of each token begins, (B, T), in sequences of DOCUMENTS equally long ones."""
    number_T = np.arange(T) * DOCUMENTS // T
    return np.tile(-(-number_T * T // DOCUMENTS), (B, 1))


def _prime(state: State) -> None:
    """Creates the optimizer's states and the sums of experts' load, as a first step does. The loss scale becomes fake
    like all else."""
    if state.parallel.balance is not None:
        state.parallel.balance.start_step(1.0)
    for replica in state.parallel.replicas:
        gradients = dict(replica.gradients)
        # As FSDP2 has them before a backward; a streamed update reads them there.
        if none := not gradients:
            gradients = {name: torch.zeros_like(master) for name, master in replica.masters.items()}
            replica.gradients.update(gradients)
        replica.updater.step(gradients, 0.0)
        if none:
            replica.gradients.clear()
        for master in replica.masters.values():
            master.grad = None
    if state.outer is not None:
        for updater in state.outer.updaters.values():  # its states, as the first outer steps make them
            updater.step({name: torch.zeros_like(weight) for name, weight in updater.masters.items()}, 0.0)
            for weight in updater.masters.values():
                weight.grad = None
    if (scaling := state.loss_scale) is not None:
        scaling.values = torch.empty(3, dtype=scaling.values.dtype, device=scaling.values.device)


def _always(
    updater: Updater, step: Callable[..., None], gradients: Any, lr: float, scale: Any, skip: Any
) -> None:
    """Updates although a trace cannot answer whether the host skips the update: the first one, and each that is
    streamed, which reads `skip`, waits, and finds it to be 0."""
    never = SimpleNamespace(item=lambda: 0.0 * skip.item()) if updater.streamed else None
    step(gradients, lr, scale, never)


class Probe(Tracker):
    """Counts memory, messages and FLOPs of a step on fake tensors in one dispatch mode instead of three, and executes
    the operations itself. races: on a GPU."""

    def __init__(self, state: State, fake: FakeMode, races: Races | None = None) -> None:
        host = state.parallel.disk is not None
        super().__init__(states_of(state), state.mesh.device.type, host)
        self.fake, self.sent, self.flops, self.races = fake, Collectives(state.mesh), 0, races
        self.syncs: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Probe:
        self.sent.listen()
        if self.races:
            self.races.streams.waited = self._waited
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.races:
            self.races.close()
        self.sent.leave()

    def held(self, func: Any, args: Any) -> object:
        return self.races.send(func, args, self.sent.axis_of) if self.races else super().held(func, args)

    def execute(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self.sent.see(func, args)
        if func.namespace == "c10d" and any(t.device.type != self.on for t in tensors_in(args)):
            raise RuntimeError(f"{func} does not send from host memory")
        if waits := self._waits(func, args, kwargs):
            item = func is aten._local_scalar_dense.default
            self._waited("item" if item else func.__name__.split(".")[0].lstrip("_"))
        out = self.fake.__torch_dispatch__(func, types, args, kwargs)
        if self.on != "cpu" and func.namespace in OWN and (type(out) is not Fake or out.on != CPU):
            operators.add(func.name())
        if out is NotImplemented:  # FakeMode leaves it to the tensors' class
            out = func(*args, **kwargs)
        if self.races and func.namespace != "c10d":
            self.races.see(func, args, kwargs, out, waits)
        self.flops += flops_of(func, args, kwargs, out)
        return out

    def _waits(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """True if the host waits for the device: it needs a value, or copies to or from the CPU and waits for it."""
        if func in COPIES:
            return self.on != "cpu" and copy_waits(func, args, kwargs)
        if func is aten.repeat_interleave.Tensor:
            return kwargs.get("output_size") is None
        if func in MASKED:
            return is_mask(args[1])
        return func in SYNCS and args[0].device.type == self.on

    def _waited(self, name: str) -> None:
        """By file and line of the innermost code of the package that runs the operation, tracing left out."""
        where = str(place() or "fivefold/autograd:0").removeprefix("fivefold/")
        self.syncs[name, where] += 1

    def found(self) -> Traced:
        sent = {key: (calls, size) for key, (calls, size) in sorted(self.sent.found.items())}
        races = dict(sorted(self.races.found.items())) if self.races else {}
        return Traced(self.peak(), sent, self.flops, dict(sorted(self.syncs.items())), races)


def copy_waits(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """True if the host waits for a copy between it and the device: it asks for that, or its own side is not pinned.
    (PyTorch pins the result of `to("cpu", non_blocking=True)`.)"""
    new = func is aten._to_copy.default
    sides = [next(tensors_in(arg)) for arg in args[: 1 if new else 2]]
    there = kwargs.get("device") if new else sides[1].device
    if there is None or there.type == sides[0].device.type:
        return False
    host = next((side for side in sides if side.device.type == "cpu"), None)
    return not non_blocking(func, args, kwargs) or (host is not None and not getattr(host, "pinned", False))


@contextmanager
def one_of(rank: int, world: int, device: torch.device) -> Iterator[Ranks]:
    """Acts as one of `world` ranks that share this machine; the others do not exist."""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads_of(world))  # some kernels have workspace per thread
    hook = sys.excepthook  # a process group replaces it by one that starts every line with [rankN]
    if world > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # of this rank only, in any world

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield Ranks(rank, world, rank, world, device)
    finally:
        torch.set_num_threads(threads)
        sys.excepthook = hook
        if world > 1:
            dist.destroy_process_group()


def share_evenly(stage: nn.Module) -> None:
    """Lets every rank send as many rows to experts as it gets from them."""
    for module in stage.modules():
        if isinstance(module, AllToAll):
            module.splits = _even  # pyright: ignore[reportAttributeAccessIssue]


def _even(rows_2CG: Tensor, rows: int) -> list[list[list[int]]]:
    _, chunks, ranks = rows_2CG.shape
    if hasattr(rows_2CG, "fake"):  # no other tensor without memory can be read
        rows_2CG.tolist()  # as the method that this replaces does
    each = [rows * (i + 1) // chunks - rows * i // chunks for i in range(chunks)]
    return [[[count // ranks + (index < count % ranks) for index in range(ranks)] for count in each]] * 2


def chosen_elements(model: ModelSection, T: int, mask: Tensor) -> int:
    """Number of elements that a mask selects: masked tokens (B T), T of each sequence, slots (M) that fit their
    experts' capacity, or else all targets."""
    if (objective := card_of(model).objective) == "mlm":
        return mask.numel() // T * predicted(objective, T)
    if not model.experts or not model.capacity_factor:
        return mask.numel()
    k = known(model.experts_per_token)
    room = expert_capacity(model.capacity_factor, mask.numel() / k, k, model.experts)
    return min(mask.numel(), model.experts * room)


@contextmanager
def a_gpu() -> Iterator[Races]:
    """Lets code inside use one GPU of PyTorch's, as far as a step does. Blocks are not compiled."""
    streams = Streams(DEVICE)
    races = Races(streams)
    cuda = {
        "Stream": streams.new,
        "Event": partial(Event, streams),
        "current_stream": streams.current,
        "default_stream": lambda device=None: streams.default,
        "stream": streams.on,
        "synchronize": streams.synchronize,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: False,
        "set_device": lambda device: None,
        "device": nullcontext,  # a class, since PyTorch asks whether something is one
        "get_device_capability": lambda device=None: CAPABILITY,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device="cuda": torch.empty(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
        "_initialized": True,
        "_lazy_init": lambda: None,
    }
    with ExitStack() as stack:
        for name, value in cuda.items():
            replaced(stack, torch.cuda, name, value)
        # It makes a tensor on the GPU: without this sharded weights cannot be made where there is none.
        replaced(stack, fake_tensor, "init_gpu_context", lambda device: None)
        replaced(stack, nn.Module, "compile", lambda module, *_, **__: None)
        # Another function, because PyTorch's compiler keeps a table of both.
        replaced(stack, torch.accelerator, "current_stream", lambda device=None: streams.current(device))
        replaced(stack, Tensor, "record_stream", lambda tensor, stream: races.record_stream(tensor, stream))
        replaced(stack, torch.UntypedStorage, "resize_", races.resizing(torch.UntypedStorage.resize_))
        replaced(stack, Work, "wait", lambda work, timeout=None: streams.arrived(work))
        replaced(stack, F, "scaled_dot_product_attention", _gpu_attention)
        # PyTorch 2.15 prefers a new cuDNN for sequences of documents; the trace takes flash.
        replaced(stack, torch.backends.cudnn, "version", lambda: None)
        yield races


def replaced(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    before = getattr(owner, name)
    stack.callback(setattr, owner, name, before)
    setattr(owner, name, value)


def _gpu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Flash attention in half precision without a mask. Else the memory-efficient kernel, or separate operations for
    groups of heads, which that kernel does not know, and for heads that its loads of 16 bytes do not fit."""
    d = q.shape[-1]
    if attn_mask is None and q.dtype in (torch.bfloat16, torch.float16):
        if d % 8:
            q, k, v = (F.pad(x, (0, -d % 8)) for x in (q, k, v))
        return torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, is_causal, scale=scale or 1 / math.sqrt(d)
        )[0][..., :d]
    if attn_mask is not None:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, -torch.inf)
    if enable_gqa or d * q.element_size() % 16:
        return torch.ops.aten._scaled_dot_product_attention_math(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if attn_mask is not None:  # rows begin at multiples of 16 bytes
        S = k.shape[2]
        attn_mask = F.pad(attn_mask, (0, -S % 8))[..., :S].expand(*q.shape[:3], S)
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]


class Creating(TorchFunctionMode):
    """Makes tensors fake that are created on the GPU, pinned, or sent there, where `fake` is not entered: modules are
    built outside of it, on "meta". Also where PyTorch itself would copy from the CPU before anybody sees it."""

    def __init__(self, fake: TorchDispatchMode) -> None:
        super().__init__()
        self.fake = fake

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func is not Tensor.pin_memory and (device is None or torch.device(device).type != "cuda"):
            return func(*args, **kwargs)
        with nullcontext() if self.fake in modes() else self.fake:
            if func is torch.tensor:
                return func(*args, **{**kwargs, "device": "cpu"}).to(device)
            return func(*args, **kwargs)


class FakeFile(disk.File):
    """A file whose bytes are a fake tensor. It takes no room on the disk."""

    def __init__(self, owner: disk.Disk, size: int, what: str):
        self.disk, self.size, self.what = owner, size, what
        self.flat = torch.empty(size, dtype=torch.uint8)

    def drop(self) -> None: ...
    def move(self, offset: int, memory: Tensor, out: bool) -> None: ...
    def close(self) -> None: ...
