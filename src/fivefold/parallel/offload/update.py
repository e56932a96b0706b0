"""The streamed update: an optimizer whose states lie in host memory or on disk (see `StreamedUpdater`)."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from fivefold.errors import UserError
from fivefold.kernels import private
from fivefold.optim.card import COMPENSATION, OptimizerCard
from fivefold.optim.rounding import Rounder, cut_off
from fivefold.optim.updater import Updater
from fivefold.parallel.offload.disk import Disk, File, Futures, aligned, alone, at_once, wait_for
from fivefold.schedules.timelines import UPDATE
from fivefold.sharding.tiers import CHUNK, SLOTS, Arena, Chunk, Piece

Tensors = dict[str, Tensor]
Named = dict[str, Tensors]
"""Tensors of several parameters, by their names."""
MASTERS, GRADIENTS, WORKING = "masters", "gradients", "working"
OUTSIDE = "outside of blocks"


class Home:
    """Where tensors of one kind lie, by the names of an arena's parameters.

    moves: False if an update works on them in place. buffer: a slot's aligned memory, CHUNK elements.
    """

    moves = True
    dtype: torch.dtype

    def move(self, chunk: Chunk, buffer: Tensor, out: bool) -> None:
        """Reads a chunk into a slot, or writes it from there."""

    def pieces(self, chunk: Chunk, buffer: Tensor) -> list[Tensor]:
        """The chunk's pieces, flat, once they are read."""
        flat = buffer.view(self.dtype)
        return [flat[p.at : p.at + p.stop - p.start] for p in chunk.pieces]


class InPlace(Home):
    """Tensors in memory that the update may work on."""

    moves = False

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32):
        self.tensors, self.dtype = tensors, dtype

    def pieces(self, chunk: Chunk, buffer: Tensor) -> list[Tensor]:
        return [self.tensors[p.name].view(-1)[p.start : p.stop] for p in chunk.pieces]


class InHost(InPlace):
    """Tensors of host memory. flat: the memory of them all, in the order of the arena. The threads of I/O copy."""

    def __init__(self, tensors: Mapping[str, Tensor], flat: Tensor, disk: Disk, what: str):
        super().__init__(tensors, flat.dtype)
        self.flat, self.disk, self.what = flat, disk, what

    def start(self, first: int, here: Tensor, out: bool) -> Futures:
        """Starts to fill a tensor of the device from an element of the arena on, or to write it there (`out`)."""
        there = self.flat[first : first + here.numel()]
        return [self.disk.start(here, there, out, self.what)]


class Copied(InPlace):
    """Tensors of the device. The update, which runs in host memory, works on copies."""

    moves = True
    pieces = Home.pieces

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, disk: Disk, what: str):
        super().__init__(tensors, dtype)
        self.disk, self.what = disk, what

    def move(self, chunk: Chunk, buffer: Tensor, out: bool) -> None:
        for there, here in zip(self.pieces(chunk, buffer), super().pieces(chunk, buffer), strict=True):
            self.disk.copy(here, there, not out, self.what)  # a slot is in host memory


class OnDisk(Home):
    """Tensors in a file, in the order of the arena. stay: those of some units, which are in memory all the same."""

    stay: Mapping[str, Tensor] = {}

    def __init__(self, file: File, dtype: torch.dtype = torch.float32):
        self.file, self.dtype = file, dtype

    def move(self, chunk: Chunk, buffer: Tensor, out: bool) -> None:
        if size := self.dtype.itemsize * (not self._stays(chunk)):
            self.file.move(chunk.start * size, buffer[: chunk.size * size], out)

    def pieces(self, chunk: Chunk, buffer: Tensor) -> list[Tensor]:
        return (InPlace(self.stay) if self._stays(chunk) else super()).pieces(chunk, buffer)

    def _stays(self, chunk: Chunk) -> bool:
        return any(piece.name in self.stay for piece in chunk.pieces)

    def start(self, first: int, here: Tensor, out: bool) -> Futures:
        """As `InHost.start`."""
        return self.file.start(first * here.itemsize, here, out)


class StreamedUpdater(Updater):
    """Runs a card's optimizer chunk by chunk, on the CPU, beside what the device computes.

    It runs as `tiers.BESIDE` says; in a step that is expected (`expect`), as `tiers.EARLY`. A unit's forward waits for
    its own update only (`ready`). The results are those of `Updater` bit for bit: an elementwise optimizer does not see
    where a chunk ends. With a rounder they are those of `Rounded`: what it rounds at random depends on elements' places
    only. homes: of "masters", "gradients", each state, and of "working" weights where they are not the masters. beside:
    on a CPU, updates run beside backward.
    """

    streamed = True

    def __init__(
        self,
        card: OptimizerCard,
        masters: Mapping[str, Tensor],
        arena: Arena,
        homes: Mapping[str, Home],
        states: Mapping[str, Mapping[str, Tensor]],
        disk: Disk,
        beside: bool = False,
        rounder: Rounder | None = None,
        **more: Any,
    ):
        """states: {state: {parameter: its tensor in the shape of the parameter}}, as views of their homes. more:
        arguments of `Updater`."""
        super().__init__(card, masters, **more)
        assert card.elementwise, f"{card.name} needs more of a parameter than a chunk"
        self.rounder = rounder
        if rounder is not None:
            self.card = rounder.card
        self.arena, self.homes, self.disk, self._views = arena, dict(homes), disk, states
        self.scalars: Named = {}  # per parameter, once there are states
        of = {id(weight): name for name, weight in masters.items()}
        self._groups = self.optimizer.param_groups if self.optimizer is not None else []
        self._group = {of[id(weight)]: group for group in self._groups for weight in group["params"]}
        self._chunks: dict[str, list[Chunk]] = {unit: [] for unit in arena.spans}
        for chunk in arena.chunks():
            self._chunks[chunk.unit].append(chunk)
        self._slots, self._made = queue.Queue[Tensors](), False
        self._thread = ThreadPoolExecutor(1, "offload-update", alone if beside else None)
        self._running: Futures = []
        self._error: BaseException | None = None
        self._done = {unit: threading.Event() for unit in arena.spans}
        self._behind: dict[str, Futures] = {}  # writes that a unit's forward waits for
        for event in self._done.values():
            event.set()
        self._expected: float | None = None  # the learning rate of an expected step
        self._left: dict[str, None] | None = None  # units that wait for the update under way
        self._lr, self._first = 0.0, True

    def expect(self, lr: float) -> None:
        self._expected = lr

    def early(self, unit: str, stored: Futures) -> None:
        """Starts the update of a unit whose gradients are complete once they are `stored`, if a step is expected."""
        if self._expected is None:
            return
        left = self._begun(self._expected)
        assert unit in left, f"a gradient of {unit or OUTSIDE} came after its update"
        self._start([unit], None, stored)

    def step(
        self,
        gradients: Mapping[str, Tensor],
        lr: float,
        scale: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None:
        """Starts the update of units that have none yet, and returns. `ready` and `settle` wait for it."""
        left, skips = [*self._begun(lr)], skip is not None and bool(skip.item())
        if not skips or self._expected is not None:
            self.largest = self._most
        if skips:
            self.settle()
            self._count()
        else:
            self._start(left, None if scale is None else scale.to("cpu"), [], last=True)
        self._expected = self._left = None

    def _begun(self, lr: float) -> dict[str, None]:
        """The units that this step has not updated yet."""
        if self._left is None:
            self.settle()
            self._lr, self._left, self._first = lr, dict.fromkeys(self._done), not self.scalars
            self._most = torch.zeros(())
        return self._left

    def _start(self, units: list[str], scale: Tensor | None, after: Futures, last: bool = False) -> None:
        assert self._left is not None
        for unit in units:
            del self._left[unit]
            self._behind[unit] = []
            self._done[unit].clear()
        if not self._made:
            self._made = True
            for _ in range(SLOTS):
                kinds = self.homes.items()
                sizes = {kind: CHUNK * home.dtype.itemsize if home.moves else 0 for kind, home in kinds}
                self._slots.put({kind: aligned(size) for kind, size in sizes.items()})
        start = at_once if private.watched() else self._thread.submit
        self._running.append(start(self._run, units, scale, after, last))

    def is_ready(self, unit: str) -> bool:
        return self._done[unit].is_set() and all(each.done() for each in self._behind.get(unit, ()))

    def ready(self, unit: str) -> None:
        """Waits until the weights of a unit are updated. Counts the time."""

        def done() -> None:
            self._done[unit].wait()
            self._noting(wait_for, self._behind.get(unit, Futures()))  # one of them may have failed

        done() if self.is_ready(unit) else self.disk.meter.wait(done, f"update of {unit or OUTSIDE}")
        self._check()

    def settle(self) -> None:
        """Waits until the update is done."""
        if self._running:
            running, self._running = self._running, []
            self.disk.meter.wait(lambda: wait_for(running), "update")
        self._check()

    def _noting(self, work: Callable[..., None], *arguments: Any) -> None:
        """Runs `work`, and keeps its error for `_check`."""
        try:
            work(*arguments)
        except BaseException as error:
            self._error = self._error or error

    def _check(self) -> None:
        if isinstance(self._error, OSError):
            raise UserError(
                f"layout.offload_dir = {self.disk.folder}: {self._error.strerror}, so the update of this step is lost. "
                "Start again with --resume"
            ) from self._error
        if self._error is not None:
            raise self._error

    def slots(self) -> list[Tensor]:
        """The memory of chunks under way, while no update runs."""
        return [memory for slot in self._slots.queue for memory in slot.values() if memory.numel()]

    def _run(self, units: list[str], scale: Tensor | None, after: Futures, last: bool) -> None:
        self._noting(self._update, units, scale, after)
        for unit in units:
            self._done[unit].set()
        if last:
            self._count()

    @torch.no_grad()
    def _update(self, units: list[str], scale: Tensor | None, after: Futures) -> None:
        """after: writes of their gradients."""
        if self._error is not None:  # an earlier unit's: it may have kept its slots
            return
        wait_for(after)
        moving = [kind for kind, home in self.homes.items() if home.moves]
        # Before the first update there are no states
        unread = {WORKING, *(self._views if self._first else ())}
        read = [kind for kind in moving if kind not in unread]
        write = [kind for kind in moving if kind != GRADIENTS]
        waits = self.homes.get(WORKING, self.homes[MASTERS]).moves
        scalars, stored = Named(), Futures()
        for chunk, slot in self._fetched([chunk for unit in units for chunk in self._chunks[unit]], read):
            self._update_chunk(chunk, slot, scale, scalars)
            written = self._store(chunk, slot, write)
            stored += written
            if waits:
                self._behind[chunk.unit] += written
            if chunk is self._chunks[chunk.unit][-1]:
                self._done[chunk.unit].set()
        wait_for(stored)
        self.scalars |= scalars

    def _fetched(self, chunks: Sequence[Chunk], kinds: Sequence[str]) -> Iterator[tuple[Chunk, Tensors]]:
        """Each chunk with its slot, which holds what is read of it. Reads ahead."""
        rest = iter(chunks)
        ahead: deque[tuple[Chunk, Tensors, Futures]] = deque()
        while True:
            while len(ahead) < SLOTS // 2 and (not ahead or not self._slots.empty()):
                chunk = next(rest, None)
                if chunk is None:
                    break
                slot = self._slots.get()
                ahead.append((chunk, slot, self._move(chunk, slot, kinds, out=False)))
            if not ahead:
                return
            chunk, slot, fetched = ahead.popleft()
            wait_for(fetched)
            yield chunk, slot

    def _store(self, chunk: Chunk, slot: Tensors, kinds: Sequence[str]) -> Futures:
        """Writes a chunk behind. Then its slot is free."""
        stored = self._move(chunk, slot, kinds, out=True)
        for each in stored:
            each.add_done_callback(lambda _: self._slots.put(slot))
        if not stored:
            self._slots.put(slot)
        return stored

    def _move(self, chunk: Chunk, slot: Tensors, kinds: Sequence[str], out: bool) -> Futures:
        def work() -> None:
            for kind in kinds:
                self.homes[kind].move(chunk, slot[kind], out)

        return [self.disk.submit(work)] if kinds else []

    def _update_chunk(self, chunk: Chunk, slot: Tensors, scale: Tensor | None, scalars: Named) -> None:
        began = time.perf_counter()
        found = {kind: home.pieces(chunk, slot[kind]) for kind, home in self.homes.items()}
        # fp32 is updated in place, all else in fp32 copies.
        weights = {p.name: t.float() for p, t in zip(chunk.pieces, found[MASTERS], strict=True)}
        gradients = {p.name: t.float() for p, t in zip(chunk.pieces, found[GRADIENTS], strict=True)}
        states: Named = {}  # none before the first update
        for number, name in enumerate(() if self._first else weights):
            states[name] = {key: value.clone() for key, value in self.scalars[name].items()}
            states[name] |= {key: found[key][number].float() for key in self._views if key != COMPENSATION}
            if COMPENSATION in self._views:
                weights[name] += found[COMPENSATION][number]
        if self.rules is None:
            after = self._fused(weights, gradients, states, scale)
        else:
            self._scale(gradients, scale)
            rates = {name: self._lr * self.rates.get(name, 1.0) for name in weights}
            self.rules.masters, self.rules.states, after = weights, states, states
            self.rules.step(gradients, rates, None)
            self.rules.masters, self.rules.states = {}, {}
        if (most := self._largest(weights)) is not None:
            self._most.copy_(torch.maximum(self._most, most))
        for number, piece in enumerate(chunk.pieces):
            scalars[piece.name] = {key: t for key, t in after[piece.name].items() if key not in self._views}
            self._keep({kind: some[number] for kind, some in found.items()}, piece, weights, after)
        self.disk.meter.note(UPDATE, "update", chunk.unit or OUTSIDE, began)

    def _keep(self, found: Tensors, piece: Piece, weights: Tensors, after: Named) -> None:
        """Puts what an update has computed where it is kept. found: a piece of each kind. weights, after: fp32 weights
        and states, by parameter."""
        name, weight, exact = piece.name, found[MASTERS], weights[piece.name]

        def put(key: str, exact: Tensor, where: Tensor) -> None:
            if self.rounder is not None:
                exact = self.rounder.round(exact, key, name, where.dtype, piece.start)
            if exact is not where:
                where.copy_(exact)

        put(name, exact, weight)
        for state in self._views:
            if state == COMPENSATION:
                found[state].copy_(cut_off(exact, weight))
            else:
                put(f"{state}.{name}", after[name][state], found[state])
        if WORKING in found:
            found[WORKING].copy_(weight)

    def _fused(self, weights: Tensors, gradients: Tensors, states: Named, scale: Tensor | None) -> Named:
        """Updates pieces of parameters by the kernel. Returns their states."""
        assert self.optimizer is not None
        for group in self._groups:
            group["params"], group["lr"] = [], self._lr * group["rate"]
        for name, weight in weights.items():
            weight.grad = gradients[name]
            self._group[name]["params"].append(weight)
            if name in states:
                self.optimizer.state[weight] = states[name]
        self._scale(gradients, scale)  # it asks the kernel, which looks at these pieces
        self.optimizer.step()
        after = {name: dict(self.optimizer.state[weight]) for name, weight in weights.items()}
        self.optimizer.state.clear()
        for weight in weights.values():
            weight.grad = None
        return after

    def states(self) -> dict[str, Tensor]:
        self.settle()
        if not self.scalars:
            return {}
        return {
            f"{state}.{name}": views[name] for state, views in self._views.items() for name in self.masters
        }

    def load(self, tensors: Mapping[str, Tensor], steps: int, number: int | None = None) -> None:
        self.settle()
        if self.rules is not None:
            self.rules.number = steps if number is None else number
        for name in self.masters:
            for state, views in self._views.items():
                self._restore(views[name], state, name, tensors)
            self.scalars[name] = {"step": torch.tensor(float(steps))} if self.card.counts else {}
            self.disk.touched(sum(views[name].nbytes for views in self._views.values()))

    def _restore(self, view: Tensor, state: str, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Without a compensation, it starts from zero."""
        key = f"{state}.{name}"
        found = tensors.get(key, torch.zeros(())) if state == COMPENSATION else tensors[key]
        if state != COMPENSATION and self.rounder is not None:
            found = self.rounder.round(found.to(torch.float32, copy=True), key, name, view.dtype)
        view.copy_(found)

    def clear(self) -> None:
        self.settle()
        self.scalars.clear()

    def kept(self) -> list[Tensor]:
        """The states, and scalars such as step counts, in their tiers."""
        scalars = [t for found in self.scalars.values() for t in found.values()]
        return [*self.states().values(), *scalars]
