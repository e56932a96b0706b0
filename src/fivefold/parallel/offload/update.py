"""The streamed update: an optimizer whose states lie in host memory or on disk (see `StreamedUpdater`)."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from fivefold.errors import UserError
from fivefold.kernels import private
from fivefold.optim.card import COMPENSATION, OptimizerCard
from fivefold.optim.rounding import Rounder, cut_off
from fivefold.optim.updater import Updater
from fivefold.parallel.offload.disk import Disk, File, aligned, alone, at_once, wait_for
from fivefold.schedules.timelines import UPDATE
from fivefold.sharding.tiers import CHUNK, SLOTS, Arena, Chunk, Piece, share_of_second

MASTERS, GRADIENTS, WORKING = "masters", "gradients", "working"
OUTSIDE = "outside of blocks"


class Home:
    """Where tensors of one kind lie, by the names of an arena's parameters.

    moves: False if an update works on them in place. buffer: a slot's aligned memory, CHUNK elements.
    """

    moves = True
    dtype: torch.dtype

    def fetch(self, chunk: Chunk, buffer: Tensor) -> None: ...
    def store(self, chunk: Chunk, buffer: Tensor) -> None: ...
    def pieces(self, chunk: Chunk, buffer: Tensor) -> list[Tensor]:
        """The chunk's pieces, flat, once they are fetched."""
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

    def load(self, start: int, into: Tensor) -> list[Future[None]]:
        """Starts to fill a tensor of the device from an element of the arena on."""
        there = self.flat[start : start + into.numel()]
        return [self.disk.submit(self.disk.copy, into, there, False, self.what)]

    def save(self, start: int, tensor: Tensor) -> list[Future[None]]:
        there = self.flat[start : start + tensor.numel()]
        return [self.disk.submit(self.disk.copy, there, tensor, True, self.what)]


class Copied(InPlace):
    """Tensors of the device. The update, which runs in host memory, works on copies."""

    moves = True
    pieces = Home.pieces

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, disk: Disk, what: str):
        super().__init__(tensors, dtype)
        self.disk, self.what = disk, what

    def fetch(self, chunk: Chunk, buffer: Tensor) -> None:
        for here, there in zip(self.pieces(chunk, buffer), super().pieces(chunk, buffer), strict=True):
            self.disk.copy(here, there, True, self.what)

    def store(self, chunk: Chunk, buffer: Tensor) -> None:
        for here, there in zip(self.pieces(chunk, buffer), super().pieces(chunk, buffer), strict=True):
            self.disk.copy(there, here, False, self.what)


class OnDisk(Home):
    """Tensors in a file, in the order of the arena."""

    def __init__(self, file: File, dtype: torch.dtype = torch.float32):
        self.file, self.dtype = file, dtype

    def fetch(self, chunk: Chunk, buffer: Tensor) -> None:
        self.file.read(*self._bytes(chunk, buffer))

    def store(self, chunk: Chunk, buffer: Tensor) -> None:
        self.file.write(*self._bytes(chunk, buffer))

    def load(self, start: int, into: Tensor) -> list[Future[None]]:
        """As `InHost.load`."""
        return self.file.load(start * into.itemsize, into)

    def save(self, start: int, tensor: Tensor) -> list[Future[None]]:
        return self.file.store(start * tensor.itemsize, tensor)

    def _bytes(self, chunk: Chunk, buffer: Tensor) -> tuple[int, Tensor]:
        return chunk.start * self.dtype.itemsize, buffer[: chunk.size * self.dtype.itemsize]


class _Second:
    """Measures the second pass, and how long backward leaves it."""

    def __init__(self) -> None:
        self._share = self._began = self._ended = self._asked = self._waited = 0.0

    def begin(self, share: float) -> None:
        self._share, self._asked, self._waited = share, 0.0, 0.0
        self._began = time.perf_counter()

    def end(self) -> None:
        self._ended = time.perf_counter()

    def asked(self, began: float, waited: float) -> None:
        """Backward wanted to overwrite gradients at `began`, and waited."""
        self._asked, self._waited = began, self._waited + waited

    def next_share(self, share: float) -> float:
        """share: if nothing was measured since the last call."""
        measured, self._share = self._share, 0.0
        if not share or not measured or self._asked <= self._began:
            return share
        slack = self._asked - self._began - self._waited
        return share_of_second(slack, (self._ended - self._began) / measured)


class StreamedUpdater(Updater):
    """Runs a card's optimizer chunk by chunk, on the CPU, while the next step's forward runs.

    Chunks are read ahead, updated and written behind, in the order in which forward needs their weights. A unit's
    forward waits for its own update only (`ready`). The results are those of `Updater` bit for bit: an elementwise
    optimizer, a fused kernel or a rule, does not see where a chunk ends. With a rounder they are those of `Rounded`:
    a chunk is updated in fp32 copies, and what it rounds at random depends on elements' places only. homes: of
    "masters", "gradients", each state, and of "working" weights where they are not the masters. Slots of constant size
    hold the chunks that are under way.

    twice: forward waits for as little I/O as possible. Of a `share` of the chunks only the working weights are written
    then. A second pass beside backward, in its order, updates these chunks again, and writes masters and states. The
    gradients of a unit may be overwritten after its `release`. The share follows from measured seconds
    (`tiers.share_of_second`).
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
        twice: bool = False,
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
        self.scalars: dict[str, dict[str, Tensor]] = {}  # per parameter, once there are states
        of = {id(weight): name for name, weight in masters.items()}
        self._groups = self.optimizer.param_groups if self.optimizer is not None else []
        self._group = {of[id(weight)]: group for group in self._groups for weight in group["params"]}
        self._lr = 0.0  # of the step under way
        self._chunks = list(arena.chunks())
        self._slots: queue.Queue[dict[str, Tensor]] = queue.Queue()
        self._running: Future[None] | None = None
        beside = alone if twice else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offload-update", initializer=beside)
        self._error: BaseException | None = None
        self._done = {unit: threading.Event() for unit in arena.spans}
        self._released = {unit: threading.Event() for unit in arena.spans}
        self.share = float(twice)
        self._second = _Second()
        self._made = False
        for event in (*self._done.values(), *self._released.values()):
            event.set()

    def step(
        self,
        gradients: Mapping[str, Tensor],
        lr: float,
        scale: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None:
        """Starts the update, and returns. `ready` and `settle` wait for it."""
        self.settle()
        self.share = self._second.next_share(self.share)
        if skip is not None and skip.item():
            self._count()
            return
        self._lr, self.largest = lr, torch.zeros(())
        for event in self._done.values():
            event.clear()
        later = self._chunks[: math.ceil(self.share * len(self._chunks))]
        for chunk in later:
            self._released[chunk.unit].clear()
        if not self._made:
            self._made = True
            for _ in range(SLOTS):
                kinds = self.homes.items()
                sizes = {kind: CHUNK * home.dtype.itemsize if home.moves else 0 for kind, home in kinds}
                self._slots.put({kind: aligned(size) for kind, size in sizes.items()})
        scale = None if scale is None else scale.to("cpu")
        start = at_once if private.watched() else self._thread.submit
        self._running = start(self._run, scale, later)

    def is_ready(self, unit: str) -> bool:
        return self._done[unit].is_set()

    def ready(self, unit: str) -> None:
        """Waits until the weights of a unit are updated. Counts the time."""
        if unit in self._done and not self._done[unit].is_set():
            self.disk.meter.wait(self._done[unit].wait, f"update of {unit or OUTSIDE}")
        self._check()

    def release(self, unit: str) -> None:
        """Waits until the gradients of a unit, the next in backward's order, may be overwritten. Counts the time."""
        began = time.perf_counter()
        if not self._released[unit].is_set():
            self.disk.meter.wait(self._released[unit].wait, f"second update of {unit or OUTSIDE}")
        self._second.asked(began, time.perf_counter() - began)
        self._check()

    def settle(self) -> None:
        """Waits until the update is done."""
        if self._running is not None:
            self.disk.meter.wait(self._running.result, "update")
            self._running = None
        self._check()

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

    def _run(self, scale: Tensor | None, later: list[Chunk]) -> None:
        try:
            with torch.no_grad():
                self._update(scale, later)
            self._count()
        except BaseException as error:
            self._error = error
        finally:
            for event in (*self._done.values(), *self._released.values()):
                event.set()

    def _update(self, scale: Tensor | None, later: list[Chunk]) -> None:
        """later: the chunks of the second pass, the first ones of forward, so that I/O is ahead of computing soon."""
        moving = [kind for kind, home in self.homes.items() if home.moves]
        # There are no states before the first update.
        unread = {WORKING} if self.scalars else {WORKING, *self._views}
        read = [kind for kind in moving if kind not in unread]
        write = [kind for kind in moving if kind != GRADIENTS]
        kept = [kind for kind in write if kind != WORKING]
        scalars: dict[str, dict[str, Tensor]] = {}
        behind: dict[str, list[Future[None]]] = {unit: [] for unit in self.arena.spans}
        last = {chunk.unit: chunk for chunk in self._chunks}
        for number, (chunk, slot) in enumerate(self._fetched(self._chunks, read)):
            self._update_chunk(chunk, slot, self.homes, scale, scalars)
            behind[chunk.unit] += self._store(chunk, slot, [WORKING] if number < len(later) else write)
            if chunk is last[chunk.unit]:
                self._announce(chunk.unit, behind[chunk.unit])
        wait_for([each for some in behind.values() for each in some])
        if later:
            self._second.begin(len(later) / len(self._chunks))
            homes = {kind: home for kind, home in self.homes.items() if kind != WORKING}
            first, stored = {chunk.unit: chunk for chunk in reversed(later)}, list[Future[None]]()
            for chunk, slot in self._fetched(later[::-1], read):
                self._update_chunk(chunk, slot, homes, scale, scalars)
                stored += self._store(chunk, slot, kept)
                if chunk is first[chunk.unit]:
                    self._released[chunk.unit].set()
            wait_for(stored)
            self._second.end()
        self.scalars = scalars

    def _fetched(
        self, chunks: Sequence[Chunk], kinds: Sequence[str]
    ) -> Iterator[tuple[Chunk, dict[str, Tensor]]]:
        """Each chunk with its slot, which holds what is read of it. Reads ahead."""
        rest = iter(chunks)
        ahead: deque[tuple[Chunk, dict[str, Tensor], list[Future[None]]]] = deque()
        while True:
            while len(ahead) < SLOTS // 2 and (not ahead or not self._slots.empty()):
                chunk = next(rest, None)
                if chunk is None:
                    break
                slot = self._slots.get()
                ahead.append((chunk, slot, self._move(chunk, slot, kinds, "fetch")))
            if not ahead:
                return
            chunk, slot, fetched = ahead.popleft()
            wait_for(fetched)
            yield chunk, slot

    def _store(self, chunk: Chunk, slot: dict[str, Tensor], kinds: Sequence[str]) -> list[Future[None]]:
        """Writes a chunk behind. Then its slot is free."""
        stored = self._move(chunk, slot, kinds, "store")
        for each in stored:
            each.add_done_callback(lambda _: self._slots.put(slot))
        if not stored:
            self._slots.put(slot)
        return stored

    def _announce(self, unit: str, stored: Sequence[Future[None]]) -> None:
        """Marks a unit as updated once its chunks are written."""
        home = self.homes.get(WORKING, self.homes[MASTERS])
        waiting = [future for future in stored if home.moves and not future.done()]
        if not waiting:
            self._done[unit].set()
            return
        count = [len(waiting)]
        lock = threading.Lock()

        def one(_: Future[None]) -> None:
            with lock:
                count[0] -= 1
                if not count[0]:
                    self._done[unit].set()

        for future in waiting:
            future.add_done_callback(one)

    def _move(
        self, chunk: Chunk, slot: dict[str, Tensor], kinds: Sequence[str], how: str
    ) -> list[Future[None]]:
        def work() -> None:
            for kind in kinds:
                getattr(self.homes[kind], how)(chunk, slot[kind])

        return [self.disk.submit(work)] if kinds else []

    def _update_chunk(
        self,
        chunk: Chunk,
        slot: dict[str, Tensor],
        homes: Mapping[str, Home],
        scale: Tensor | None,
        scalars: dict[str, dict[str, Tensor]],
    ) -> None:
        began = time.perf_counter()
        found = {kind: home.pieces(chunk, slot[kind]) for kind, home in homes.items()}
        # fp32 is updated in place, all else in fp32 copies.
        weights = {p.name: t.float() for p, t in zip(chunk.pieces, found[MASTERS], strict=True)}
        gradients = {p.name: t.float() for p, t in zip(chunk.pieces, found[GRADIENTS], strict=True)}
        states: dict[str, dict[str, Tensor]] = {}  # none before the first update
        for number, name in enumerate(weights if self.scalars else ()):
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
        if (most := self._largest(weights)) is not None and self.largest is not None:
            self.largest = torch.maximum(self.largest, most)
        for number, piece in enumerate(chunk.pieces):
            scalars[piece.name] = {key: t for key, t in after[piece.name].items() if key not in self._views}
            self._keep({kind: some[number] for kind, some in found.items()}, piece, weights, after)
        self.disk.meter.note(UPDATE, "update", chunk.unit or OUTSIDE, began)

    def _keep(
        self,
        found: Mapping[str, Tensor],
        piece: Piece,
        weights: Mapping[str, Tensor],
        after: Mapping[str, Mapping[str, Tensor]],
    ) -> None:
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

    def _fused(
        self,
        weights: dict[str, Tensor],
        gradients: dict[str, Tensor],
        states: dict[str, dict[str, Tensor]],
        scale: Tensor | None,
    ) -> dict[str, dict[str, Tensor]]:
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
