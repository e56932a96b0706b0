"""The states that one replica keeps in host memory or on disk: masters, moments, gradients (sharding/tiers.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.optim.card import OptimizerCard
from fivefold.optim.rounding import Rounder
from fivefold.parallel.offload.disk import Disk
from fivefold.parallel.offload.update import (
    GRADIENTS,
    MASTERS,
    WORKING,
    Copied,
    Home,
    InHost,
    InPlace,
    OnDisk,
    StreamedUpdater,
)
from fivefold.precision import torch_dtype
from fivefold.sharding.tiers import WINDOW, Tiers, arena, unit_of


class Offload:
    """Where one replica keeps what. like: tensors in the shapes of its parameters, or of a rank's rows of them, and in
    the dtype of their masters and of the sums of gradients, in the order of the module. Only these two are read.
    sharded: (the unit, the elements with padding) of each parameter, if ZeRO divides them. window: units whose weights
    are on the device at once, if they leave. early: updates run beside backward."""

    def __init__(
        self,
        disk: Disk,
        tiers: Tiers,
        like: Mapping[str, Tensor],
        device: torch.device,
        sharded: Mapping[str, tuple[str, int]] | None = None,
        window: int = WINDOW,
        early: bool = False,
    ):
        self.disk, self.tiers, self.device, self.window, self.early = disk, tiers, device, window, early
        self.shapes = {name: tuple(t.shape) for name, t in like.items()}
        (self.dtype,) = {t.dtype for t in like.values()}
        units = {name: unit for name, (unit, _) in sharded.items()} if sharded else None
        room = {name: size for name, (_, size) in sharded.items()} if sharded else None
        self.arena = arena({name: t.numel() for name, t in like.items()}, units, room)
        self.homes: dict[str, Home] = {}
        self.updater: StreamedUpdater | None = None

    def views(self, kind: str, tier: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Memory of a tier for one kind of tensor, in the masters' dtype or another one: its views by name, in the
        parameters' shapes."""
        total, dtype = self.arena.total, dtype or self.dtype
        if tier == "disk":
            file = self.disk.file(total * dtype.itemsize, kind)
            flat, self.homes[kind] = file.tensor(dtype, total), OnDisk(file, dtype)
        else:
            flat = torch.zeros(total, dtype=dtype, pin_memory=self.device.type == "cuda")
        found = self.cut(flat)
        if tier != "disk":
            self.homes[kind] = InHost(found, flat, self.disk, kind)
        return found

    def cut(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters' views of a flat tensor in the order of the arena."""
        starts, sizes = self.arena.starts, self.arena.sizes
        return {n: flat[starts[n] : starts[n] + sizes[n]].view(shape) for n, shape in self.shapes.items()}

    def masters(self) -> dict[str, Tensor] | None:
        """Views of the masters, without values; None if they stay."""
        return None if self.tiers.masters == "device" else self.views(MASTERS, self.tiers.masters)

    def update_by(
        self,
        card: OptimizerCard,
        masters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        working: Mapping[str, Tensor] | None,
        rounder: Rounder | None = None,
        **more: Any,
    ) -> StreamedUpdater:
        """The optimizer over this replica's masters. gradients, working: on the device, unless they have a home.
        rounder: if masters are not fp32. more: arguments of `Updater`."""
        in_place = self.tiers.states == "disk" and self.device.type == "cpu"
        here = [(MASTERS, masters, self.dtype), (GRADIENTS, gradients, self.dtype)]
        if working:  # else they are the masters, or lie elsewhere
            here.append((WORKING, working, next(iter(working.values())).dtype))
        for kind, tensors, dtype in here:
            away = InPlace(tensors, dtype) if in_place else Copied(tensors, dtype, self.disk, kind)
            self.homes.setdefault(kind, away)
        kept = card if rounder is None else rounder.card
        states = {
            state.name: self.views(state.name, self.tiers.states, torch_dtype(state.dtype))
            for state in kept.states
        }
        homes, beside = (self.arena, self.homes, states, self.disk), self.early and self.device.type == "cpu"
        self.updater = StreamedUpdater(card, masters, *homes, beside, rounder=rounder, **more)
        return self.updater

    def attach(self, stages: list[nn.Module]) -> None:
        """Lets each unit's forward wait for its update: a stage for what is outside of its blocks, a block for
        itself."""
        for stage in stages:
            units = {unit_of(name) for name, _ in stage.named_parameters()} & self.arena.spans.keys()
            for unit in units:
                ready = lambda *_, unit=unit: self.updater and self.updater.ready(unit)  # noqa: E731
                stage.get_submodule(unit).register_forward_pre_hook(ready)
