"""Makes a rank's replicas: its stages on "meta" get memory and initial weights, and something that sums their gradients
and updates them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fivefold.models.init import init_part
from fivefold.parallel.data import DataParallel
from fivefold.parallel.flat import allocate
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.offload.disk import Disk
from fivefold.parallel.offload.pages import Paged
from fivefold.parallel.offload.states import Offload
from fivefold.parallel.replica import Frozen, Replica
from fivefold.recipe import Recipe
from fivefold.schedules.compression import compressor
from fivefold.sharding.parts import Part
from fivefold.sharding.syncs import syncs
from fivefold.sharding.tiers import OFFLOADS, Tiers, tiers
from fivefold.sharding.units import FlatBuffer, Keeping

if TYPE_CHECKING:  # importing FSDP2 takes half a second
    from fivefold.parallel.unit_messages import UnitMessages


class ReplicaBuilder:
    """Makes replicas. filled: parameters have memory and values already. made, offloads: what there is so far (see
    `Parallel`)."""

    def __init__(
        self,
        recipe: Recipe,
        mesh: Mesh,
        table: dict[str, Part],
        compute_dtype: torch.dtype,
        reduce: torch.dtype,
        disk: Disk | None,
        filled: bool,
    ):
        self.recipe, self.mesh, self.table, self.disk, self.filled = recipe, mesh, table, disk, filled
        self.compute_dtype, self.reduce = compute_dtype, reduce
        self.made: list[Replica] = []
        self.offloads: dict[int, Offload] = {}

    def replicas(
        self, numbered: dict[int, Any], kept: Sequence[Keeping], messages: dict[int, list[UnitMessages]]
    ) -> dict[int, list[Replica]]:
        """The replicas of each stage, by its number. messages: of the stages' units."""
        found: dict[int, list[Replica]] = {}
        if not self.filled:
            for stage in numbered.values():
                _make_buffers(stage, self.mesh.device)
        for keeping in kept:
            stages = [numbered[number] for number in keeping.stages]
            some: list[Replica] = []
            if keeping.units:
                some.append(self._sharded(stages, [m for number in keeping.stages for m in messages[number]]))
            some += [self._whole(stages, buffer) for buffer in keeping.buffers]
            if keeping.frozen:
                still, _, _ = self._parameters(stages, keeping.frozen, None)
                some.append(Frozen(still, self.table, self.compute_dtype))
            self.made += some
            found |= dict.fromkeys(keeping.stages, some)
        return found

    def _sharded(self, stages: list[nn.Module], messages: list[UnitMessages]) -> Replica:
        """The replica whose units FSDP2 shards."""
        from fivefold.parallel import zero

        layout = self.mesh.layout
        if not self.filled:
            zero.materialize(stages, self.mesh.device, self._initial)
        found = zero.Sharded(stages, self.table, self.compute_dtype, messages, syncs(layout), layout.pp > 1)
        offload = self._offload(found.masters, tiers(layout.offload, sharded=True))
        if offload is not None:
            self.offloads[id(found)] = offload
        return found

    def _whole(self, stages: list[nn.Module], buffer: FlatBuffer) -> Replica:
        """The replica of parameters that this rank has whole, in a flat buffer."""
        layout, sums = self.mesh.layout, self.mesh.sums(buffer.group)
        meta = {name: p for stage in stages for name, p in stage.named_parameters()}
        like = {name: meta[name] for name in buffer.names}
        own_masters = any(p.dtype != self.compute_dtype for p in like.values())
        offload = self._offload(like, tiers(layout.offload, own_masters=own_masters))
        params, flat, masters = self._parameters(stages, buffer.names, offload)
        shared = params, self.table, self.compute_dtype, sums, self.reduce
        if offload is None or offload.tiers.gradients == "device":
            compress, size = compressor(layout.compress), buffer.bucket_bytes
            found = DataParallel(*shared, flat, compress, size, masters, self.mesh.device)
        else:
            assert masters is not None
            found = Paged(*shared, masters, offload, layout.tp > 1 or layout.pp > 1)
        if offload is not None:
            self.offloads[id(found)] = offload
            offload.attach(list(stages))
        if isinstance(found, Paged):
            found.attach(list(stages))
        return found

    def _offload(self, like: Mapping[str, Tensor], where: Tiers) -> Offload | None:
        """The tiers of parameters like these (see `Offload`); None: all is on the device."""
        if self.disk is None or not OFFLOADS[self.mesh.layout.offload].streams:
            return None
        return Offload(self.disk, where, like, self.mesh.device)

    def _parameters(
        self, stages: list[nn.Module], names: Sequence[str], offload: Offload | None
    ) -> tuple[dict[str, nn.Parameter], Tensor | None, dict[str, Tensor] | None]:
        """Parameters with memory and values, and the flat buffer that they are views of (parallel/flat.py); or masters
        that lie elsewhere. Stages that share a parameter compute with one tensor."""
        known = {name: p for stage in reversed(stages) for name, p in stage.named_parameters()}
        params = {name: known[name] for name in names}
        if self.filled:
            placed, flat, masters = params, None, None
        else:
            masters = offload.masters() if offload is not None else None
            flat, views = allocate(params, self.mesh.device) if masters is None else (None, masters)
            for name, view in views.items():
                view.copy_(self._initial(name))
                if masters is not None and offload is not None:
                    offload.disk.touched(view.nbytes)
            # Autograd counts the changes of `.data` apart: an update beside forward changes masters of later units.
            placed = {name: nn.Parameter(views[name].data) for name in params}
        _place(stages, placed)
        return placed, flat, masters

    def _initial(self, name: str) -> Tensor:
        """This rank's part of a parameter's initial weights."""
        return init_part(self.recipe.train.seed, name, self.recipe.model, self.table[name], self.mesh.device)


def _make_buffers(stage: nn.Module, device: torch.device) -> None:
    """Turns buffers on "meta" into zeros on the device."""
    for module in stage.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros_like(buffer, device=device))


def _place(stages: Sequence[nn.Module], placed: dict[str, nn.Parameter]) -> None:
    """Puts parameters into the stages that have one of the same name."""
    for stage in stages:
        for name, parameter in list(stage.named_parameters()):
            if placed.get(name, parameter) is not parameter:
                owner, _, leaf = name.rpartition(".")
                setattr(stage.get_submodule(owner), leaf, placed[name])
