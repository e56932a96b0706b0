"""Follows the bytes of all tensors that are there in a step, by what they are for.

    with Tracker(states_of(state)) as tracker:
        ...  # a training step
    tracker.peak().total

A dispatch mode sees the results of every operation and their arguments: tensors that were made out of its sight (by a
library, before it began) count from their first use. Memory is counted by storage, so views cost nothing, and is
counted until the storage is freed; FSDP2 frees weights by making their storage small, which is followed, too. What
an operation takes inside itself, and gives back before it ends, is not seen. Collectives are waited for at once: what
is there does not depend on how fast they are.

The same holds under FakeTensorMode, where nothing is allocated: enter the tracker inside it.

| Category | What is counted |
|---|---|
| params | fp32 masters and the weights that compute; under ZeRO 1 and 2 these are the gathered ones |
| gradients | the fp32 sums; also what adds up over microbatches before it is summed: whole under ZeRO 1 |
| optimizer | moments and counts |
| activations | what forward, or its repetition, has made and is still there when backward goes on |
| buffers | the rest: workspace, gathered weights under ZeRO 3, what is sent and received, inputs |
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._distributed_c10d import (
    Work,
    _create_work_from_future,  # pyright: ignore[reportAttributeAccessIssue]
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from fivefold.train.state import State

CATEGORIES: tuple[str, ...] = ("params", "gradients", "optimizer", "activations", "buffers")
States = Mapping[str, Callable[[], Iterable[Tensor]]]
"""Gives the tensors of a category that are there now."""

SETTLE_S = 0.002
_PLAIN = (Tensor, nn.Parameter, FakeTensor)
_TRANSFERS = ("send", "recv_", "recv_any_source_")  # they are done when the other side is: not waited for
_FROM_DATA = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)  # torch.tensor


def states_of(state: State) -> States:
    """Of a trainer's state."""
    replicas, optimizer = state.parallel.replicas, state.optimizer

    def kept(kind: str) -> list[Tensor]:
        return [tensor for replica in replicas for tensor in replica.kept().get(kind, [])]

    def moments() -> list[Tensor]:
        return [t for values in optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]

    return {
        "params": lambda: [*state.masters().values(), *kept("params")],
        "gradients": lambda: [*state.gradients().values(), *kept("gradients")],
        "optimizer": moments,
        "buffers": lambda: kept("buffers"),
    }


@dataclass(frozen=True)
class Peak:
    """total: most bytes at once. at_peak: of each category then. highest: most of each category, at whatever time."""

    total: int
    at_peak: dict[str, int]
    highest: dict[str, int]


@dataclass(eq=False)
class _Memory:
    """A storage that is there. made: inside the tracker."""

    address: int
    size: int
    made: bool
    category: str | None = None
    reference: Any = field(default=None, repr=False)


class Tracker(TorchDispatchMode):
    """Counts from when it is entered until it is left. states: what belongs to which category; other memory is
    activations or buffers. For one step: gradients are known as such while they are there."""

    def __init__(self, states: States | None = None) -> None:
        super().__init__()
        self.states = states or {}
        self.there: dict[int, _Memory] = {}  # by the storage's address
        self.changes: list[tuple[_Memory, int]] = []  # bytes more or less, in order
        self.of_forward: list[_Memory] = []  # made in forward since backward last went on
        self.forward = True
        self.fake = False

    def __enter__(self) -> Tracker:
        self.fake = _fake_mode_is_on()
        self._find_states()
        self._follow_resizing()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # pyright: ignore[reportAttributeAccessIssue]
        self._find_states()
        self._mark_activations()
        self.of_forward.clear()
        for memory in self.there.values():
            memory.reference = None  # what is freed from here on does not count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":  # questions about the device, which only fake tensors are asked
            self._look_at_phase()
        given = func in _FROM_DATA  # which get a tensor that nobody else has, and return it
        if not given:
            for tensor in tensors_in((args, kwargs)):
                self._see(tensor, made=False)
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            self._see(tensor, made=not given)
        transfer = func.__name__.split(".")[0] in _TRANSFERS
        if func.namespace == "c10d" and (self.fake or not transfer):
            return _settled(out, list(tensors_in(args)), wait=not self.fake)
        return out

    def peak(self) -> Peak:
        """Of all that happened so far."""
        now, total = dict.fromkeys(CATEGORIES, 0), 0
        highest, at_peak, most = dict(now), dict(now), 0
        for memory, change in self.changes:
            category = memory.category or "buffers"
            now[category] += change
            total += change
            highest[category] = max(highest[category], now[category])
            if total > most:
                most, at_peak = total, dict(now)
        return Peak(most, at_peak, highest)

    def made(self) -> int:
        """Bytes that were made inside and are there now."""
        return sum(memory.size for memory in self.there.values() if memory.made)

    def _look_at_phase(self) -> None:
        """Forward is what runs outside of backward, and what checkpointing repeats in it (whose hooks are set then)."""
        forward = (
            torch._C._current_graph_task_id() == -1 or _top_saved_tensors_default_hooks(True) is not None
        )
        if self.forward and not forward:
            self._mark_activations()
            self._mark("gradients")
        self.forward = forward

    def _mark_activations(self) -> None:
        for memory in self.of_forward:
            if memory.category is None and self.there.get(memory.address) is memory:
                memory.category = "activations"
        self.of_forward.clear()

    def _find_states(self) -> None:
        for category in self.states:
            self._mark(category)

    def _mark(self, category: str) -> None:
        for tensor in self.states.get(category, list)():
            for memory in self._see(tensor, made=False):
                if memory.category in (None, "activations"):
                    memory.category = category

    def _see(self, tensor: Tensor, made: bool) -> list[_Memory]:
        """The memory of a tensor, which counts from now on if it did not before."""
        found = []
        for plain in _plain(tensor):
            if plain.device.type == "meta" or (isinstance(plain, FakeTensor) and not self.fake):
                continue  # shapes only
            storage = plain.untyped_storage()
            memory = self.there.get(storage._cdata)
            if memory is None:
                memory = self._add(storage, made)
            elif memory.size != storage.nbytes():
                self._change(memory, storage.nbytes())
            found.append(memory)
        return found

    def _add(self, storage: torch.UntypedStorage, made: bool) -> _Memory:
        memory = _Memory(storage._cdata, storage.nbytes(), made)
        memory.reference = weakref.ref(storage, lambda _: self._gone(memory))
        self.there[memory.address] = memory
        self.changes.append((memory, memory.size))
        if made and self.forward:
            self.of_forward.append(memory)
        return memory

    def _gone(self, memory: _Memory) -> None:
        self.changes.append((memory, -memory.size))
        del self.there[memory.address]

    def _change(self, memory: _Memory, size: int) -> None:
        self.changes.append((memory, size - memory.size))
        memory.size = size

    def _follow_resizing(self) -> None:
        """A storage that changes its size is no operation: its method is watched while the tracker is entered."""
        self._resize = resize = torch.UntypedStorage.resize_

        @wraps(resize)
        def watched(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            memory = self.there.get(storage._cdata)
            if memory is not None:
                self._change(memory, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = watched  # pyright: ignore[reportAttributeAccessIssue]


def _fake_mode_is_on() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _settled(out: Any, tensors: list[Tensor], wait: bool) -> Any:
    """What a collective returns, with a handle that keeps its tensors until it is dropped. gloo's do that, or keep a
    copy; but its threads let go of them at a time of their own, and fake handles at once. Then memory is freed where
    the program frees it, and two runs count the same. wait: until it is done."""
    if isinstance(out, tuple | list):
        return type(out)(_settled(item, tensors, wait) for item in out)
    if not (isinstance(out, torch.ScriptObject) and out._type().qualified_name().endswith("c10d.Work")):
        return out
    if wait:
        Work.unbox(out).wait()
        time.sleep(SETTLE_S)
    done: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    done.set_result(tensors)
    return _create_work_from_future(done).boxed()


def tensors_in(found: Any) -> Iterator[Tensor]:
    """All in nested tuples, lists and dictionaries."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, tuple | list):
        for item in found:
            yield from tensors_in(item)
    elif isinstance(found, dict):
        yield from tensors_in(tuple(found.values()))


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with memory inside one that wraps others, such as a DTensor."""
    if type(tensor) in _PLAIN or not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # pyright: ignore[reportAttributeAccessIssue]
        yield from _plain(getattr(tensor, name))
