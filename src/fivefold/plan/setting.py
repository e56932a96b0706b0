"""A layout of a model on a cluster by a program: all that a prediction depends on, and the model cut into stages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from fivefold.errors import UserError
from fivefold.models.card import Card, card_of
from fivefold.models.operations import WHOLE_SEQUENCES, Sizes, Work
from fivefold.models.recomputation import of_blocks
from fivefold.models.section import ModelSection
from fivefold.plan.cluster.devices import Cluster, Device
from fivefold.plan.messages.communication import Group, group
from fivefold.plan.software import FIVEFOLD, Partition, Software, States
from fivefold.precision import DTYPES, PRECISIONS, chosen
from fivefold.schedules.pipeline import DEFAULT, Schedule, build, stages_per_rank
from fivefold.sharding.layout import Layout
from fivefold.sharding.layout_rules import on_nodes
from fivefold.sharding.parts import Shape, stage_blocks, stages_of
from fivefold.sharding.sync import ONE_SITE, Sites
from fivefold.sharding.units import Keeping, compressed_buckets, keepings


@dataclass(frozen=True)
class Setting:
    """Everything that a price depends on. layout: of one site, where several train apart. cluster: of all of them.
    microbatches: of the rank that has most. sequences: of the global batch, if ranks have unequally many."""

    model: ModelSection
    layout: Layout
    cluster: Cluster
    software: Software
    sizes: Sizes
    mode: str
    microbatches: int
    sites: Sites = ONE_SITE
    sequences: int | None = None

    @property
    def dtype(self) -> str:
        """The dtype of activations."""
        return PRECISIONS[self.mode].working

    @property
    def rate(self) -> str:
        """The dtype of products, by which the device's peak is listed."""
        return PRECISIONS[self.mode].rate_on(self.cluster.device.peak)

    @property
    def states(self) -> States:
        """Bytes per parameter."""
        return self.software.states[self.mode]

    @cached_property
    def card(self) -> Card:
        return card_of(self.model)

    @cached_property
    def work(self) -> Work:
        """All operations of a rank for one microbatch."""
        return self.card.work(self.sizes, self.software)

    @property
    def recompute(self) -> tuple[str, ...]:
        """The mode of recomputation of each block."""
        return of_blocks(self.layout.recompute, self.model.layers)

    @property
    def activation(self) -> float:
        """Bytes of the activation between two blocks."""
        return self.sizes.n * self.model.dim * self.sizes.e

    @cached_property
    def stages(self) -> tuple[range, ...]:
        """The blocks of each pipeline stage."""
        return stages(self.model, self.layout, self.software.partition)

    def blocks(self, position: int) -> list[int]:
        """The blocks of a pipeline position, in the order of its stages."""
        return [number for stage in stages_of(self.layout, position) for number in self.stages[stage]]

    def ends(self, position: int) -> tuple[bool, bool]:
        """Whether a pipeline position has the first stage, and the last."""
        mine = stages_of(self.layout, position)
        return 0 in mine, len(self.stages) - 1 in mine

    def keepings(self, position: int) -> list[Keeping]:
        """What the ranks of a pipeline position gather, scatter and sum together."""
        return keepings(self.card, self.layout, stages_of(self.layout, position), self.stages)

    def compressed_buckets(self, position: int) -> Iterator[tuple[str, int, tuple[Shape, ...]]]:
        """(group, its number of ranks, shapes) of each bucket whose sum the ranks of a position compress."""
        return compressed_buckets(self.card, self.layout, stages_of(self.layout, position), self.stages)

    def schedule(self, microbatches: int) -> Schedule:
        """The pipeline schedule of so many microbatches."""
        return schedule(self.layout.schedule, self.layout.pp, microbatches, self.layout.virtual_stages)

    def group(self, axis: str) -> Group:
        """The ranks of an axis, "sites" included."""
        if axis == "sites":
            return Group(
                self.sites.count, max(1, min(self.sites.count, self.cluster.per_node // self.layout.ranks))
            )
        return group(self.layout, self.cluster, axis)


def setting(
    model: ModelSection,
    layout: Layout,
    cluster: Cluster,
    B: int,
    microbatches: int,
    mode: str = "bf16",
    software: Software = FIVEFOLD,
    sequences: int | None = None,
) -> Setting:
    """Builds a setting. B: sequences per microbatch. sequences: see `Setting`. The cluster is resized to the layout's
    ranks."""
    card, documents = PRECISIONS[mode], software.documents
    e = DTYPES[card.working].bytes
    sizes = Sizes(
        model,
        B,
        layout.tp,
        layout.cp,
        layout.ep,
        layout.sp,
        e,
        layout.cp_method,
        software.expert_load,
        layout.sp_regather,
        layout.expert_chunks if layout.ep > 1 else 1,
        DTYPES[card.rate_on(cluster.device.peak)].bytes
        if card.kernel
        else 0.0,  # emulated: the working dtype
        documents.seen(model, layout, B, e, software) if documents else WHOLE_SEQUENCES,
    )
    cluster = cluster.for_ranks(layout.ranks)
    layout = on_nodes(layout, cluster.per_node)
    return Setting(model, layout, cluster, software, sizes, mode, microbatches, sequences=sequences)


def mode_of(wanted: str, cluster: Cluster) -> str:
    """The mode that `precision.mode` stands for. Clusters have a rate of bf16 if it is faster than fp32.

    Raises:
        UserError: the planner does not price it there.
    """
    device = cluster.device
    mode = chosen(wanted, "bf16" in device.peak)
    lacks = _lacks(mode, device) if mode in PRECISIONS else ""
    if lacks or mode not in PRECISIONS:
        known = ", ".join(name for name in PRECISIONS if not _lacks(name, device))
        why = f" {device.name} has no rate of {lacks} (`fivefold clusters`);" if lacks else ""
        raise UserError(f"precision.mode = {mode}:{why} the planner prices {known} on {device.name}")
    return mode


def _lacks(mode: str, device: Device) -> str:
    """The dtype that a mode needs and the device has no rate of."""
    needed = (PRECISIONS[mode].working, PRECISIONS[mode].rate_on(device.peak))
    return next((dtype for dtype in needed if dtype not in device.peak), "")


schedule = lru_cache(maxsize=256)(build)
"""The pipeline schedule by its name, ranks, microbatches and virtual stages."""


def stages(model: ModelSection, layout: Layout, how: Partition = "balanced") -> tuple[range, ...]:
    """The blocks of each stage, cut as the trainer does or as other programs do (see `software.Partition`)."""
    name = layout.schedule if layout.pp > 1 else DEFAULT
    return _stages(model, layout.pp, name, layout.virtual_stages, how)


@lru_cache(maxsize=4096)
def _stages(
    model: ModelSection, pp: int, name: str, virtual_stages: int, how: Partition
) -> tuple[range, ...]:
    if how == "balanced":
        return stage_blocks(card_of(model), Layout(pp=pp, schedule=name, virtual_stages=virtual_stages))
    count = pp * stages_per_rank(name, virtual_stages) if pp > 1 else 1
    if how == "even":
        each = model.layers / count
        return tuple(range(round(i * each), round((i + 1) * each)) for i in range(count))
    return _greedy(model, count)


def _greedy(model: ModelSection, count: int) -> tuple[range, ...]:
    """Fills stages in order, each until it exceeds its share of the matmul weights, output layer included."""
    layer = sum(
        math.prod(s) for n, s in card_of(model).parameters.items() if n.startswith("blocks.0.") and len(s) > 1
    )
    total = layer * model.layers + (model.vocab_size or 0) * model.dim
    cut, start = [], 0
    for stage in range(count - 1):
        stop = min(model.layers, math.floor(total * (stage + 1) / count / layer) + 1)
        cut.append(range(start, max(start, stop)))
        start = max(start, stop)
    return (*cut, range(start, model.layers))
