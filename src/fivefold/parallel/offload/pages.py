"""Gradients that leave the device while backward runs, and weights of blocks that are there only while they compute.

docs/parallelism/offload.md says what moves when (ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857;
STRONGHOLD, SC 2022). A unit is a block, or what is outside of blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

from fivefold.comm import Scheduled, Started
from fivefold.kernels import private
from fivefold.kernels.elementwise import add_gradient
from fivefold.optim.scaling import Norms, norms
from fivefold.optim.updater import Updater
from fivefold.parallel.offload.disk import Futures, wait_for
from fivefold.parallel.offload.states import Offload
from fivefold.parallel.offload.update import GRADIENTS, OUTSIDE, WORKING, InHost, OnDisk
from fivefold.parallel.replica import Hooked, Replica
from fivefold.sharding.parts import Part
from fivefold.sharding.tiers import BEHIND, unit_of
from fivefold.sharding.units import buffer_order


class Unit:
    """The parameters of a unit on the device. working: their flat weights, if all in one piece; paged: only while they
    compute. gradients: the flat sums, from the first gradient of a backward until they are written; waiting: for so
    many of `count` gradients. coming, going: I/O under way. beside: units that are next and before, by direction."""

    def __init__(self, name: str, start: int, stop: int, count: int, paged: bool):
        self.name, self.start, self.size, self.count, self.paged = name, start, stop - start, count, paged
        self.working = torch.empty(0)
        self.here, self.stays, self.backward = True, False, False
        self.gradients: Tensor | None = None
        self.waiting, self.stored = count, False
        self.coming: Futures = []
        self.going: Futures = []
        self.sum: Started | None = None
        self.beside: dict[int, Unit] = {}


class Pages(Replica):
    """Gradients that leave the device unit by unit, and weights that are there only while they compute: of parameters
    that a rank has whole (`Paged`), or of its rows (`rows.Rows`). One file or host buffer holds each kind, in the order
    of the arena.

    counts: gradients that a microbatch brings to each unit. computing: weights that compute, by name; views of the
    units' `working` where these are paged. reduced: True if gradients change after they are stored
    (`Parallel.reductions`); their norms are then computed from what is stored.
    """

    updater: Updater
    computing: dict[str, Tensor]

    def keep(
        self, offload: Offload, counts: Mapping[str, int], compute_dtype: torch.dtype, reduced: bool
    ) -> None:
        """Takes the tiers of an offload. `computing` and each unit's weights are set afterwards."""
        self.offload, self.reduced, tiers = offload, reduced, offload.tiers
        if tiers.gradients == "device":
            flat = torch.zeros(offload.arena.total, dtype=offload.dtype, device=offload.device)
            self.gradients, self._gradients = offload.cut(flat), flat
        else:
            self.gradients = dict(buffer_order(list(offload.views(GRADIENTS, tiers.gradients).items())))
            self._gradients = self._home(GRADIENTS)
        self._working: InHost | OnDisk | None = None
        if tiers.working != "device":
            offload.views(WORKING, tiers.working, compute_dtype)
            self._working = self._home(WORKING)
        self.pages = {
            name: Unit(name, *span, counts[name], self._working is not None and name != "")
            for name, span in offload.arena.spans.items()
        }
        self._fresh, self._syncing = set[str](), False  # parameters without a gradient in this step
        self._behind: deque[Futures] = deque()
        self._norms: dict[str, Norms] = {}

    def give_weights(self, unit: Unit, dtype: torch.dtype) -> None:
        """Memory for the weights of a unit, in one piece."""
        unit.working = torch.zeros(unit.size, dtype=dtype, device=self.offload.device)

    def settled(self) -> None:
        """`computing` is set: what stays on the device is written there, also by updates."""
        names = self.offload.arena.names
        away = {name for unit in self.pages.values() if unit.paged for name in names(unit.name)}
        self.working = {name: weight for name, weight in self.computing.items() if name not in away}
        if isinstance(self._working, InHost):
            self._working.tensors = {**self._working.tensors, **self.working}
        elif self._working is not None:
            self._working.stay = self.working

    def _home(self, kind: str) -> InHost | OnDisk:
        home = self.offload.homes[kind]
        assert isinstance(home, InHost | OnDisk)
        return home

    # Weights

    def in_order(self, forward: list[Unit], backward: list[Unit], last_stays: bool) -> None:
        """The paged units of a stage, in the orders in which their weights are needed. last_stays: those of the last
        window stay until their backward, which is next."""
        for direction, units in ((1, forward), (-1, backward)):
            for one, following in pairwise(units):
                one.beside[direction] = following
        for unit in forward[-self.offload.window :]:
            unit.stays = last_stays

    def need(self, unit: Unit, direction: int) -> None:
        """Waits until the weights of a block are there, and starts to read those of the next ones."""
        self._fetch(unit)
        further: Unit | None = unit
        for _ in range(self.offload.window - 1):
            further = further and further.beside.get(direction)
            if further is not None:
                self._fetch(further, wait=False)
        self.wait(unit)

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
        unit.working.untyped_storage().resize_(unit.size * unit.working.itemsize)
        unit.coming += self._working.start(unit.start, unit.working, out=False)
        unit.here = True

    def wait(self, unit: Unit) -> None:
        coming, unit.coming = unit.coming, []
        self.offload.disk.arrive(coming, unit.name or OUTSIDE)

    def free(self, unit: Unit) -> None:
        unit.backward = False
        if unit.paged and unit.here:
            self.wait(unit)
            unit.working.untyped_storage().resize_(0)
            unit.here = False

    def refresh(self) -> None:
        """Writes the weights that compute, after the masters have changed other than by an update."""
        for unit in self.pages.values():
            if unit.paged:
                self.wait(unit)
                unit.working.untyped_storage().resize_(unit.size * unit.working.itemsize)
            for name in self.offload.arena.names(unit.name):
                self.computing[name].copy_(self.masters[name])
            if unit.paged:
                assert self._working is not None
                wait_for(self._working.start(unit.start, unit.working, out=True))
                unit.here = True
                self.free(unit)
        self.offload.disk.drop()

    # Gradients

    def start_step(self) -> None:
        self._fresh, self._syncing = set(self.computing), False
        for unit in self.pages.values():
            unit.waiting, unit.stored = unit.count, False

    def gather_sums(self, unit: Unit) -> None:
        """Makes the buffer of a unit's gradients, and starts to read what earlier microbatches have added up."""
        if isinstance(self._gradients, Tensor):
            unit.gradients = self._gradients[unit.start : unit.start + unit.size]
        elif unit.gradients is None:
            self.offload.disk.arrive(unit.going, "gradients")
            unit.going = []
            unit.gradients = torch.empty(unit.size, dtype=self.offload.dtype, device=self.offload.device)
            if unit.stored:
                unit.coming += self._gradients.start(unit.start, unit.gradients, out=False)

    def write(self, unit: Unit) -> None:
        """All gradients of a unit have arrived in this microbatch, and are summed if it is the last one."""
        assert unit.gradients is not None
        if self._syncing and not self.reduced:
            for name in self.offload.arena.names(unit.name):
                self._norms[name] = norms([self.sum_of(unit, name)])
        if not isinstance(self._gradients, Tensor):
            # they hold the buffer until it is written
            unit.going += self._gradients.start(unit.start, unit.gradients, out=True)
        unit.gradients, unit.stored = None, True
        # Tensor-parallel sums, which change any gradient afterwards, are refused; a pipeline's change tied embeddings
        if self._syncing and self.offload.updater is not None and (unit.name or not self.reduced):
            self.offload.updater.early(unit.name, [*unit.going])
        self._behind.append(unit.going)
        if len(self._behind) > BEHIND:
            oldest = self._behind.popleft()
            self.offload.disk.meter.wait(lambda: wait_for(oldest), "gradients")

    def sum_of(self, unit: Unit, name: str) -> Tensor:
        """The sums of a parameter, flat."""
        assert unit.gradients is not None
        start = self.offload.arena.starts[name] - unit.start
        return unit.gradients[start : start + self.offload.arena.sizes[name]]

    def lacking(self, unit: Unit) -> bool:
        """True if some parameter of a unit had no gradient in this step. Its sums are zeroed."""
        names = [name for name in self.offload.arena.names(unit.name) if name in self._fresh]
        if names:
            self.allow_zeros(names)
            self.gather_sums(unit)
            self.wait(unit)
            for name in names:
                self.sum_of(unit, name).zero_()
        return bool(names)

    def written(self) -> None:
        """Waits until all sums are in their tier."""
        going = [each for unit in self.pages.values() for each in unit.going]
        self.offload.disk.meter.wait(lambda: wait_for(going), "gradients")
        self._behind.clear()
        for unit in self.pages.values():
            unit.going = []
        self._syncing = False

    def norms(self) -> dict[str, Norms] | None:
        """The norms of each gradient, computed before it left the device. None if gradients have changed since."""
        return None if self.reduced else self._norms

    def kept(self) -> dict[str, list[Tensor]]:
        """Weights and sums of gradients that are on the device now."""
        units = self.pages.values()
        return {
            "params": [unit.working for unit in units if unit.here],
            "gradients": [unit.gradients for unit in units if unit.gradients is not None],
        }


class Paged(Pages, Hooked):
    """ZeRO stage 0 with gradients in another tier, and perhaps working weights."""

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
        self.sums, self.reduce, self.masters = sums, reduce, masters
        self.names, self.params = list(params), list(params.values())
        self.parts = {name: parts[name] for name in params}
        arena = offload.arena
        self.keep(offload, {unit: len(arena.names(unit)) for unit in arena.spans}, compute_dtype, reduced)
        self._unit: dict[str, Unit] = {}
        for unit in self.pages.values():
            self.give_weights(unit, compute_dtype)
            for name in arena.names(unit.name):
                p, at = params[name], arena.starts[name] - unit.start
                p.data = unit.working[at : at + p.numel()].view(p.shape)
                self._unit[name] = unit
        self.computing = {name: p.data for name, p in params.items()}
        self.settled()
        self._backward = list(reversed(self.pages.values()))  # what is outside of blocks is the last
        self._summing: list[Unit] = []
        self._ready, self._started = set[str](), 0  # in this step's sums
        self._splits = False
        self.hook()
        self.refresh()

    def attach(self, stages: list[nn.Module], pipeline: bool, splits: bool) -> None:
        """Reads the weights of each block before it computes, and frees them afterwards. After `Offload.attach`: a
        block's weights are updated before they are read. splits: a pipeline puts off gradients."""
        self._splits = splits
        for stage in stages:
            here = {unit_of(name) for name, _ in stage.named_parameters()}
            units = [unit for unit in self.pages.values() if unit.paged and unit.name in here]
            self.in_order(units, units[::-1], last_stays=not pipeline)
            for unit in units:
                block = stage.get_submodule(unit.name)
                block.register_forward_pre_hook(
                    lambda *_, unit=unit: self.need(unit, -1 if private.in_backward() else 1)
                )
                block.register_forward_hook(lambda _m, _i, output, unit=unit: self._computed(unit, output))

    def _computed(self, unit: Unit, output: object) -> None:
        """Frees a block's weights after its forward, unless it is a recomputation's."""
        if private.in_backward():
            return
        outputs = output if isinstance(output, tuple) else (output,)
        tensors = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
        for tensor in tensors:
            tensor.register_hook(lambda _, unit=unit: self._before_backward(unit))
        if not (tensors and unit.stays):
            self.free(unit)

    def _before_backward(self, unit: Unit) -> None:
        self._free_computed(unit)
        unit.backward = True
        if self._splits:
            private.after_backward(self._free_computed)
        self.need(unit, -1)
        self.gather_sums(unit)
        if before := unit.beside.get(-1):
            self.gather_sums(before)

    def _free_computed(self, but: Unit | None = None) -> None:
        """Frees the weights of units whose backward is over; their gradients may be deferred."""
        for unit in self.pages.values():
            if unit.backward and unit is not but:
                self.free(unit)

    def enable_sync(self) -> None:
        self._syncing, self._started = True, 0
        self._ready.clear()

    def add(self, index: int, gradient: Tensor) -> None:
        name = self.names[index]
        unit = self._unit[name]
        self.gather_sums(unit)
        self.wait(unit)
        add_gradient(self.sum_of(unit, name), gradient, name in self._fresh)
        self._fresh.discard(name)

    def added(self, index: int) -> None:
        unit = self._unit[self.names[index]]
        unit.waiting -= 1
        if not unit.waiting:
            self._complete(unit)

    def _complete(self, unit: Unit) -> None:
        """As many gradients of a unit have arrived as a microbatch brings. With a split backward they may be of several
        microbatches, so its weights may still compute."""
        if not self._splits:
            self.free(unit)
        unit.waiting = unit.count
        if self._syncing and self.sums.axis.size > 1:
            self._ready.add(unit.name)
            self._start_sums()
        else:
            self.write(unit)

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
        self.write(unit)

    def finish(self) -> None:
        """Sums and writes the units that lack gradients, or were written before their last backward, in the same order
        on all ranks, and waits for all of them."""
        for unit in self._backward:
            left = unit.name not in self._ready
            if self.lacking(unit) or (left and (unit.gradients is not None or self.sums.axis.size > 1)):
                self.gather_sums(unit)
                self.wait(unit)
                self._complete(unit)
        while self._summing:
            self._summed(self._summing.pop(0))
        self.written()

    def update(self, lr: float, scale: Tensor | None, skip: Tensor) -> None:
        self.updater.step(self.gradients, lr, scale, skip)

    def kept(self) -> dict[str, list[Tensor]]:
        return super().kept() | {"buffers": self.sums.scratch.kept()}
