"""Gradients that leave the device while backward runs, and weights of blocks that are there only while they compute.

A unit (a block; what is outside of blocks) has its gradients in a buffer of the device while its backward runs. Once
all have arrived they are summed over ranks and written to their tier. With further microbatches they are read again
before the unit's next backward (ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857). With
`all:disk` a block's weights are read ahead of its forward and again of its backward, and freed after each, so a window
of blocks is on the device at any time (STRONGHOLD, SC 2022).
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

import torch
from torch import Tensor, nn

from fivefold.comm import Scheduled, Started
from fivefold.kernels.elementwise import add_gradient
from fivefold.optim.scaling import Norms, norms
from fivefold.optim.updater import Updater
from fivefold.parallel.offload.disk import wait_for
from fivefold.parallel.offload.states import Offload
from fivefold.parallel.offload.update import GRADIENTS, WORKING, Home, InHost, InPlace, OnDisk
from fivefold.parallel.replica import Hooked
from fivefold.sharding.parts import Part
from fivefold.sharding.tiers import AHEAD, BEHIND, Chunk
from fivefold.sharding.units import buffer_order

Futures = list[Future[None]]


class Unit:
    """The parameters of a unit on the device. working: their flat weights; paged: only while they compute. gradients:
    the flat sums, from the first gradient of a backward until they are written. coming, going: I/O under way."""

    def __init__(self, name: str, start: int, stop: int, indices: list[int], working: Tensor, paged: bool):
        self.name, self.start, self.size, self.indices = name, start, stop - start, indices
        self.working, self.paged, self.here = working, paged, True
        self.gradients: Tensor | None = None
        self.waiting, self.stored = len(indices), False
        self.coming: Futures = []
        self.going: Futures = []
        self.sum: Started | None = None

    def bytes(self) -> int:
        return self.size * self.working.itemsize


class Paged(Hooked):
    """ZeRO stage 0 with gradients in another tier, and perhaps working weights. One file or
    host buffer holds each kind, in the order of the arena.

    reduced: True if gradients change after they are stored (`Parallel.reductions`); their norms are then computed from
    what is stored.
    """

    updater: Updater

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        parts: dict[str, Part],
        compute_dtype: torch.dtype,
        sums: Scheduled,
        reduce: torch.dtype,
        masters: dict[str, Tensor],
        offload: Offload,
        reduced: bool,
    ):
        self.offload, self.sums, self.reduce, self.reduced = offload, sums, reduce, reduced
        self.names, self.params = list(params), list(params.values())
        self.parts = {name: parts[name] for name in params}
        arena, tiers, device = offload.arena, offload.tiers, offload.device
        self.masters = masters
        self.gradients = dict(buffer_order(list(offload.views(GRADIENTS, tiers.gradients).items())))
        self._gradients = self._home(GRADIENTS)
        self._working: InHost | OnDisk | None = None
        if tiers.working != "device":
            offload.views(WORKING, tiers.working, compute_dtype)
            self._working = self._home(WORKING)
        self.units: dict[str, Unit] = {}
        self._unit: list[Unit] = [None] * len(self.names)  # type: ignore[list-item]
        resident: dict[str, Tensor] = {}
        for name, (start, stop) in arena.spans.items():
            flat = torch.empty(stop - start, dtype=compute_dtype, device=device)
            paged = self._working is not None and name != ""
            indices = [self.names.index(each) for each in arena.names(name)]
            unit = self.units[name] = Unit(name, start, stop, indices, flat, paged)
            for index in indices:
                p, at = self.params[index], arena.starts[self.names[index]] - start
                p.data = flat[at : at + p.numel()].view(p.shape)
                self._unit[index] = unit
                if not paged:
                    resident[self.names[index]] = p.data
        self.working = resident
        if self._working is not None:
            offload.homes[WORKING] = _ByUnit(offload.homes[WORKING], resident, compute_dtype)
        self._order = [unit for unit in self.units.values() if unit.paged]
        self._place = {unit.name: place for place, unit in enumerate(self._order)}
        self._fresh, self._syncing = [True] * len(self.params), False
        self._backward = list(reversed(self.units.values()))  # what is outside of blocks is the last
        self._summing: list[Unit] = []
        self._behind: deque[Futures] = deque()
        self._ready, self._started = set[str](), 0  # in this step's sums
        self._norms: dict[str, Norms] = {}
        self.hook()
        self.refresh()

    def _home(self, kind: str) -> InHost | OnDisk:
        home = self.offload.homes[kind]
        assert isinstance(home, InHost | OnDisk)
        return home

    # Weights

    def attach(self, stages: list[nn.Module]) -> None:
        """Reads the weights of each block before it computes, and frees them afterwards. After `Offload.attach`: a
        block's weights are updated before they are read."""
        for stage in stages:
            for unit in self._order:
                block = stage.get_submodule(unit.name)
                block.register_forward_pre_hook(lambda *_, unit=unit: self._need(unit, 1))
                block.register_forward_hook(lambda _m, _i, output, unit=unit: self._computed(unit, output))

    def _need(self, unit: Unit, direction: int) -> None:
        """Waits until the weights of a block are there, and starts to read those of the next ones."""
        self._fetch(unit)
        place = self._place[unit.name]
        for further in range(1, AHEAD + 1):
            if 0 <= place + direction * further < len(self._order):
                self._fetch(self._order[place + direction * further], wait=False)
        self._wait(unit)

    def _fetch(self, unit: Unit, wait: bool = True) -> None:
        assert self._working is not None
        if unit.here:
            return
        updater = self.offload.updater
        if updater is not None:
            if wait:
                updater.ready(unit.name)
            elif not updater.is_ready(unit.name):
                return
        unit.working.untyped_storage().resize_(unit.bytes())
        unit.coming += self._working.load(unit.start, unit.working)
        unit.here = True

    def _wait(self, unit: Unit) -> None:
        if unit.coming:
            coming, unit.coming = unit.coming, []
            self.offload.disk.meter.wait(lambda: wait_for(coming))

    def _computed(self, unit: Unit, output: object) -> None:
        """Frees a block's weights after its forward, except the last block's, whose backward is next."""
        last = unit is self._order[-1]
        outputs = output if isinstance(output, tuple) else (output,)
        tensors = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
        for tensor in tensors:
            tensor.register_hook(lambda _, unit=unit: self._before_backward(unit))
        if not (tensors and last):
            self._free(unit)

    def _free(self, unit: Unit) -> None:
        if unit.paged and unit.here:
            self._wait(unit)
            unit.working.untyped_storage().resize_(0)
            unit.here = False

    def _before_backward(self, unit: Unit) -> None:
        self._need(unit, -1)
        self._gather_sums(unit)
        if place := self._place[unit.name]:
            self._gather_sums(self._order[place - 1])

    def refresh(self) -> None:
        """Writes the working weights, after the masters have changed other than by an update."""
        for unit in self.units.values():
            if unit.paged:
                self._wait(unit)
                unit.working.untyped_storage().resize_(unit.bytes())
            for index in unit.indices:
                self.params[index].data.copy_(self.masters[self.names[index]])
            if unit.paged:
                assert self._working is not None
                wait_for(self._working.save(unit.start, unit.working))
                unit.here = True
                self._free(unit)
        self.offload.disk.drop()

    # Gradients

    def start_step(self) -> None:
        self._fresh, self._syncing = [True] * len(self.params), False
        for unit in self.units.values():
            unit.waiting, unit.stored = len(unit.indices), False

    def enable_sync(self) -> None:
        self._syncing, self._started = True, 0
        self._ready.clear()

    def _gather_sums(self, unit: Unit) -> None:
        """Makes the buffer of a unit's gradients, and starts to read what earlier microbatches have added up."""
        if unit.gradients is None:
            for each in unit.going:
                each.result()
            unit.going = []
            unit.gradients = torch.empty(unit.size, dtype=self.offload.dtype, device=self.offload.device)
            if unit.stored:
                unit.coming += self._gradients.load(unit.start, unit.gradients)

    def add(self, index: int, gradient: Tensor) -> None:
        unit = self._unit[index]
        self._gather_sums(unit)
        self._wait(unit)
        add_gradient(self._slice(unit, index), gradient, self._fresh[index])
        self._fresh[index] = False

    def added(self, index: int) -> None:
        unit = self._unit[index]
        unit.waiting -= 1
        if not unit.waiting:
            self._complete(unit)

    def _complete(self, unit: Unit) -> None:
        """All gradients of a unit have arrived in this microbatch."""
        self._free(unit)
        unit.waiting = len(unit.indices)
        if self._syncing and self.sums.axis.size > 1:
            self._ready.add(unit.name)
            self._start_sums()
        else:
            self._write(unit)

    def _start_sums(self) -> None:
        """Starts the sums of units that are ready, in backward's order: all ranks issue the same messages in the same
        order, even if some parameter has no gradient on one of them."""
        while self._started < len(self._backward) and self._backward[self._started].name in self._ready:
            unit = self._backward[self._started]
            self._started += 1
            assert unit.gradients is not None
            unit.sum = self.sums.start(unit.gradients.to(self.reduce), f"unit {unit.name or 'outside'}")
            self._summing.append(unit)
            while len(self._summing) > 1:  # one sum under way: constant memory
                self._summed(self._summing.pop(0))

    def _summed(self, unit: Unit) -> None:
        assert unit.sum is not None
        assert unit.gradients is not None
        found, unit.sum = unit.sum(), None
        if found.dtype != unit.gradients.dtype:
            unit.gradients.copy_(found)
        self._write(unit)

    def _write(self, unit: Unit) -> None:
        assert unit.gradients is not None
        if self._syncing and not self.reduced:
            for index in unit.indices:
                name = self.names[index]
                self._norms[name] = norms([self._slice(unit, index)])
        if not unit.stored and self.offload.updater is not None:
            self.offload.updater.release(unit.name)
        unit.going += self._gradients.save(
            unit.start, unit.gradients
        )  # they hold the buffer until it is written
        unit.gradients, unit.stored = None, True
        self._behind.append(unit.going)
        if len(self._behind) > BEHIND:
            oldest = self._behind.popleft()
            self.offload.disk.meter.wait(lambda: wait_for(oldest))

    def _slice(self, unit: Unit, index: int) -> Tensor:
        assert unit.gradients is not None
        start = self.offload.arena.starts[self.names[index]] - unit.start
        return unit.gradients[start : start + self.params[index].numel()]

    def finish(self) -> None:
        """Sums and writes the units that lack gradients, in the same order on all ranks, and waits for all of them."""
        for unit in self._backward:
            left = unit.gradients is not None and unit.name not in self._ready
            if left or any(self._fresh[index] for index in unit.indices):
                self._gather_sums(unit)
                self._wait(unit)
                for index in unit.indices:
                    if self._fresh[index]:
                        self._slice(unit, index).zero_()
                self._complete(unit)
        while self._summing:
            self._summed(self._summing.pop(0))
        going = [each for unit in self.units.values() for each in unit.going]
        self.offload.disk.meter.wait(lambda: wait_for(going))
        self._behind.clear()
        for unit in self.units.values():
            unit.going = []
        self._syncing = False

    def norms(self) -> dict[str, Norms] | None:
        """The norms of each gradient, computed before it left the device. None if gradients have changed since."""
        return None if self.reduced else self._norms

    def update(self, lr: float, scale: Tensor | None, skip: Tensor) -> None:
        self.updater.step(self.gradients, lr, scale, skip)

    def kept(self) -> dict[str, list[Tensor]]:
        """Weights and sums of gradients that are on the device now."""
        units = self.units.values()
        return {
            "params": [unit.working for unit in units if unit.here],
            "gradients": [unit.gradients for unit in units if unit.gradients is not None],
            "buffers": self.sums.scratch.kept(),
        }


class _ByUnit(Home):
    """Working weights of which only blocks lie in another tier; the others are written on the device."""

    def __init__(self, away: Home, resident: dict[str, Tensor], dtype: torch.dtype):
        self.away, self.here, self.dtype = away, InPlace(resident, dtype), dtype

    def store(self, chunk: Chunk, buffer: Tensor) -> None:
        if chunk.unit:
            self.away.store(chunk, buffer)

    def pieces(self, chunk: Chunk, buffer: Tensor) -> list[Tensor]:
        return (self.away if chunk.unit else self.here).pieces(chunk, buffer)
