"""Tracks the bytes of all live tensors in a step, by category.

    with Tracker(states_of(state)) as tracker:
        ...  # a training step
    tracker.peak().total

A dispatch mode sees the arguments and results of every operation. A tensor that it did not see made (by a library, or
before it began) counts from its first use. Memory is counted per storage, so views cost nothing, and until the storage
is freed. FSDP2 frees weights by shrinking their storage, which is tracked, too. Workspace inside an operation is not
seen. Collectives are waited for at once, so the count does not depend on their speed.

Fake tensors work, too, though they allocate nothing: enter the tracker inside `FakeMode`.

| Category | What is counted |
|---|---|
| params | the weights that compute; under ZeRO 1 and 2 these are the gathered ones |
| gradients | the fp32 sums, and gradients that add up over microbatches before they are summed: whole under ZeRO 1 |
| optimizer | moments and counts; fp32 masters of weights that compute in another dtype |
| activations | made by forward, or by its recomputation, and still live when backward continues; kept by a deferred W |
| buffers | the rest: workspace, gathered weights under ZeRO 3, sent and received tensors, inputs |
| host | CPU memory beside another device: what `layout.offload` keeps there. Not in the sum |
| disk | files that are mapped as tensors, of any kind. Not in the sum |
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._distributed_c10d import Work
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fivefold.parallel.offload.activations import Activations
from fivefold.schedules.timelines import AWAY, CATEGORIES, Change, MemoryTimeline, Phase, of_changes
from fivefold_plan.trace.fake import FROM_DATA, DispatchMode, Fake, FakeMode, done_work

if TYPE_CHECKING:
    from fivefold.step.state import State

aten = torch.ops.aten
FUSED = (
    aten._to_copy.default, aten.clone.default, aten.copy_.default, aten.cat.default, aten.constant_pad_nd.default,
    aten.sum.default, aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default, aten.native_dropout.default, aten.native_dropout_backward.default,
    aten.slice_backward.default, aten.select_backward.default, aten.empty_like.default, aten.empty_strided.default,
    aten.zeros_like.default, aten.ones_like.default, aten.new_zeros.default,
)  # fmt: skip
"""Operations that compiled code joins with others, besides those that PyTorch marks as pointwise."""
OWN = ("aten", "torch_attn")
"""PyTorch's own operators."""
_WITHOUT_KERNEL = ("empty", "new_empty", "detach", "lift_fresh", "_unsafe_view")
LiveTensors = Mapping[str, Callable[[], Iterable[Tensor]]]
"""Per category, a function that returns its live tensors."""

SETTLE_S = 0.002
_PLAIN = (Tensor, nn.Parameter, Fake)
_TRANSFERS = ("send", "recv_", "recv_any_source_")  # not waited for: they complete when the other side does


def states_of(state: State) -> LiveTensors:
    """Returns the categories of a trainer's state."""
    parallel = state.parallel
    replicas, pipeline, disk = parallel.replicas, parallel.pipeline, parallel.disk

    def buffers() -> list[Tensor]:
        saved, streamed = parallel.activations, [offload.updater for offload in parallel.offloads.values()]
        pool = saved.pool() if isinstance(saved, Activations) else []
        return [*kept("buffers"), *pool, *(t for updater in streamed if updater for t in updater.slots())]

    def kept(kind: str) -> list[Tensor]:
        return [tensor for replica in replicas for tensor in replica.kept().get(kind, [])]

    return {
        # First: whatever they are.
        "disk": lambda: [file.flat for file in disk.files] if disk is not None else [],
        "params": lambda: kept("params"),  # before masters: where they compute, they are params
        "gradients": lambda: [
            *(g for replica in replicas for g in replica.gradients.values()),
            *kept("gradients"),
        ],
        "optimizer": lambda: [
            *state.masters().values(),
            *(t for replica in replicas for t in replica.updater.kept()),
            *(state.outer.kept() if state.outer else []),
        ],
        "buffers": buffers,
        "activations": lambda: pipeline.deferred.kept() if pipeline else [],
    }


@dataclass(frozen=True)
class Peak:
    """total: the most bytes at once. at_peak: bytes of each category then. highest: the most of each, at any time.
    away: the same of AWAY, which the total leaves out. phases: `at_peak` of each kind of phase of the step."""

    total: int
    at_peak: dict[str, int]
    highest: dict[str, int]
    away: dict[str, int] = field(default_factory=lambda: dict.fromkeys(AWAY, 0))
    phases: dict[str, dict[str, int]] = field(default_factory=dict, compare=False)

    def of_phases(self) -> Peak:
        """Total and categories of the phase that has most: each phase may grow by a line of its own."""
        at_peak = max(self.phases.values(), key=lambda sizes: sum(sizes.values()))
        return replace(self, total=sum(at_peak.values()), at_peak=at_peak)


@dataclass(eq=False)
class _Memory:
    """A live storage. made: True if it was allocated inside the tracker. unwritten: its bytes if it is in no memory
    yet (`Tracker.inside`)."""

    address: int
    size: int
    made: bool
    category: str | None = None
    unwritten: int = 0
    reference: Any = field(default=None, repr=False)


class Tracker(DispatchMode):
    """Counts from entry to exit. states: tensors of known categories; other memory is activations or buffers. on: the
    type of the device whose memory counts. host: another device's, with the CPU's tensors beside it. Track one step
    only: gradients are recognised while they are live.

    inside: the compiled code that runs now, if any. In it, results of joined operations are in no memory until another
    kind of operation reads them, or the code ends.
    """

    def __init__(self, states: LiveTensors | None = None, on: str = "cpu", host: bool = False) -> None:
        super().__init__()
        self.inside: object = None
        self.joined = self.on_fakes = False
        self.on, self.host = on, "cpu" if host and on != "cpu" else None
        self.states = states or {}
        self.there: dict[int, _Memory] = {}  # by the storage's address
        self.before = 0  # number of changes that only found what was there
        self.changes: list[tuple[_Memory, int, float]] = []  # bytes more or less, and when, in order
        self.phases: list[tuple[str, int, float]] = []  # of the step: kind, number of changes before, when
        self.of_forward: list[_Memory] = []  # made in forward since backward last ran
        self.forward = True

    def __enter__(self) -> Tracker:
        self.on_fakes = any(isinstance(mode, FakeMode) for mode in modes())
        self.began = time.perf_counter()
        for category in self.states:
            self._mark(category)
        self.before = len(self.changes)
        self.began = time.perf_counter()
        self._begin("forward")
        self._resize = resize = torch.UntypedStorage.resize_

        @wraps(resize)
        def watched(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if memory := self.there.get(storage._cdata):
                self._change(memory, storage.nbytes())
            return result

        # `resize_` is not a dispatched operation.
        torch.UntypedStorage.resize_ = watched  # pyright: ignore[reportAttributeAccessIssue]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.ended = self._now()
        torch.UntypedStorage.resize_ = self._resize  # pyright: ignore[reportAttributeAccessIssue]
        for category in self.states:
            self._mark(category)
        self._mark_activations()
        self.of_forward.clear()
        for memory in self.there.values():
            memory.reference = None  # storages freed from here on do not count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._look_at_phase()
        joins = torch.Tag.pointwise in func.tags or func in FUSED or is_free(func)
        self.joined = self.inside is not None and joins
        given = func in FROM_DATA  # these return their argument, which nobody else has seen
        for tensor in () if given else tensors_in((args, kwargs)):
            self._see(tensor, False)
        out = self.execute(func, types, args, kwargs)
        for tensor in tensors_in(out):
            self._see(tensor, not given)
        if func.namespace == "c10d" and (self.on_fakes or func.__name__.split(".")[0] not in _TRANSFERS):
            return _settled(out, self.held(func, args), wait=not self.on_fakes)
        return out

    def held(self, func: Any, args: Any) -> object:
        """What the handle of a collective keeps."""
        return list(tensors_in(args))

    def execute(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def peak(self) -> Peak:
        """The figures of everything so far."""
        now, most = dict.fromkeys((*CATEGORIES, *AWAY), 0), dict[str, int]()
        highest, phases, total = dict(now), dict[str, dict[str, int]](), 0
        begins = {number: kind for kind, number, _ in self.phases}  # of the last one that begins there
        kind = "forward"
        for number, (memory, change, _) in enumerate(self.changes):
            kind, category = begins.get(number, kind), memory.category or "buffers"
            now[category] += change
            total += change * (category in CATEGORIES)
            highest[category] = max(highest[category], now[category])
            if total > most.get(kind, 0):
                most[kind], phases[kind] = total, {name: now[name] for name in CATEGORIES}
        besides, nothing = {name: highest[name] for name in CATEGORIES}, dict.fromkeys(CATEGORIES, 0)
        away = {name: highest[name] for name in AWAY}
        return Peak(0, nothing, besides, away, phases or {kind: nothing}).of_phases()

    def begin_update(self) -> None:
        """The gradient is whole; the rest of the step is its update."""
        if self.phases and self.phases[-1][0] == "forward":  # no forward follows the last backward
            self.phases[-1] = ("other", *self.phases[-1][1:])
        self._begin("update")

    def timeline(self, timed: bool = True, rank: int = 0, step: int = 0) -> MemoryTimeline:
        """The bytes of everything so far, over time. timed: False if no time passed, as on fake tensors."""
        ends = [*self.phases[1:], ("", len(self.changes), self.ended)]

        def when(number: int, at: float) -> float:
            return max(0.0, at if timed else float(number - self.before))  # what was there before came at 0

        phases = [
            Phase(kind, when(number, at), when(last, end))
            for (kind, number, at), (_, last, end) in zip(self.phases, ends, strict=True)
        ]
        changes = (
            Change(0.0 if number < self.before else when(number, at), memory.category or "buffers", size)
            for number, (memory, size, at) in enumerate(self.changes)
        )
        length, unit = when(len(self.changes), self.ended), "s" if timed else "changes"
        return of_changes(changes, [p for p in phases if p.end > p.start], length, unit, rank, step)

    def made(self) -> int:
        """Bytes that were allocated inside the tracker and are still live."""
        return sum(memory.size for memory in self.there.values() if memory.made)

    def _look_at_phase(self) -> None:
        """Forward runs outside of backward, or in it when checkpointing recomputes (its saved-tensor hooks are set
        then; those of offload are set all the time). What is asked of PyTorch is not documented: activations cannot be
        told from other memory without it."""
        backward = torch._C._current_graph_task_id() != -1
        hooks = _top_saved_tensors_default_hooks(True) if backward else None
        forward = not backward or (
            hooks is not None and not isinstance(getattr(hooks[0], "__self__", None), Activations)
        )
        kind = "backward" if backward else "forward"
        if self.phases[-1][0] not in (kind, "update"):  # behind them comes the update, until the end
            self._begin(kind)
        if self.forward and not forward:
            self._mark_activations()
            self._mark("params")  # copies of weights on a node are gone when the step ends
            self._mark("gradients")
            self._mark("activations")
        self.forward = forward

    def _begin(self, kind: str) -> None:
        self.phases.append((kind, len(self.changes), self._now()))

    def _now(self) -> float:
        return time.perf_counter() - self.began

    def _mark_activations(self) -> None:
        for memory in self.of_forward:
            if memory.category is None and self.there.get(memory.address) is memory:
                memory.category = "activations"
        self.of_forward.clear()

    def _mark(self, category: str) -> None:
        for tensor in self.states.get(category, list)():
            for memory in self._see(tensor, made=False):
                if memory.category in (None, "activations") or category == "disk":
                    memory.category = category

    def _see(self, tensor: Tensor, made: bool) -> list[_Memory]:
        """The memory of a tensor; from now on it counts."""
        return [
            self._count(part.untyped_storage(), made, part.device.type)
            for part in plain(tensor)
            if part.device.type in (self.on, self.host)
            and not isinstance(part, FakeTensor)  # shapes that DTensor asks about are no memory
        ]

    def _count(self, storage: torch.UntypedStorage, made: bool, device: str | None) -> _Memory:
        memory = self.there.get(storage._cdata)
        if memory is None:
            return self._add(storage, made, "host" if device == self.host else None)
        if memory.unwritten and self.joined:
            return memory
        if memory.size != (size := storage.nbytes()):
            memory.unwritten = 0
            self._change(memory, size)
        return memory

    def enter_code(self, code: object) -> None:
        """Compiled code begins. What is left of other code is in memory."""
        for memory in [memory for memory in self.there.values() if memory.unwritten]:
            self._change(memory, memory.unwritten)
            memory.unwritten = 0
        self.inside = code

    def leave_code(self, code: object) -> None:
        """It ends, unless it has ended already."""
        if self.inside is code:
            self.enter_code(None)

    def _add(self, storage: torch.UntypedStorage, made: bool, category: str | None) -> _Memory:
        memory = _Memory(storage._cdata, 0, made, category)

        def gone(_: object) -> None:
            self._change(memory, 0)
            del self.there[memory.address]

        memory.reference = weakref.ref(storage, gone)
        self.there[memory.address] = memory
        if made and self.joined:
            memory.unwritten = storage.nbytes()
        else:
            self._change(memory, storage.nbytes())
        if made and self.forward:
            self.of_forward.append(memory)
        return memory

    def _change(self, memory: _Memory, size: int) -> None:
        self.changes.append((memory, size - memory.size, self._now()))
        memory.size = size


def _settled(out: Any, kept: object, wait: bool) -> Any:
    """The result of a collective, with a handle that keeps `kept` until it is dropped. gloo's handles keep tensors,
    or a copy, but its threads release them at any time; fake handles release them at once. With this handle
    memory is freed where the program frees it, so two runs count the same. wait: waits until the collective is done."""
    if isinstance(out, tuple | list):
        return type(out)(_settled(item, kept, wait) for item in out)
    if not (isinstance(out, torch.ScriptObject) and out._type().qualified_name().endswith("c10d.Work")):
        return out
    if wait:
        Work.unbox(out).wait()
        time.sleep(SETTLE_S)
    return done_work(kept)


@cache
def is_free(func: Any) -> bool:
    """True for operations without a kernel: views, and memory without values."""
    given = (result.alias_info for result in func._schema.returns)
    return func.__name__.startswith(_WITHOUT_KERNEL) or any(one and not one.is_write for one in given)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


def plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold memory inside a wrapper such as a DTensor."""
    if type(tensor) in _PLAIN or not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # pyright: ignore[reportAttributeAccessIssue]
        yield from plain(getattr(tensor, name))
