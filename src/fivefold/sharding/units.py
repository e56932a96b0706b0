"""The parameters whose weights are gathered and whose gradients are scattered or summed together, as data. No torch.

Without ZeRO every rank has its parameters whole. Gradients lie in flat buffers, which are summed in buckets. With ZeRO
they are divided by rows, and FSDP2 gathers and scatters them in units: a block, its experts if fewer ranks share
these, and the rest of the stage. `parallel` builds both from these tables, and the planner counts them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fivefold.schedules.compression import NONE
from fivefold.sharding.layout import Layout, groups
from fivefold.sharding.parts import (
    Model,
    Shape,
    block_of,
    kept_rows,
    local_parameters,
    sharing_group,
    stage_blocks,
    stage_parameters,
)
from fivefold.sharding.shares import buckets
from fivefold.sharding.syncs import syncs


@dataclass(frozen=True)
class FsdpUnit:
    """Parameters that FSDP2 gathers and scatters together.

    stage: their pipeline stage. module: name of the wrapped module; "" is the stage itself. group: the ranks that share
    them. shares: elements of each parameter on a rank, with rows padded to a multiple of the ranks. padded: the sum
    over all ranks. trained: that of the parameters with gradients. across: the parameters that are divided along
    another dim than the first.
    """

    stage: int
    module: str
    group: str
    names: tuple[str, ...]
    shares: tuple[int, ...]
    padded: int
    trained: int
    across: tuple[str, ...]


@dataclass(frozen=True)
class FlatBuffer:
    """Parameters that every rank of a group has whole, in the module's order. Their gradients share one flat buffer,
    which is cut into buckets of at least `bucket_bytes`."""

    group: str
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    bucket_bytes: float

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def bucket_sizes(self) -> list[int]:
        """Elements of each bucket."""
        return [sum(math.prod(shape) for shape in shapes) for shapes in self.bucket_shapes]

    @property
    def bucket_shapes(self) -> tuple[tuple[Shape, ...], ...]:
        """The shapes of the parameters of each bucket."""
        return _bucket_shapes(self.shapes, self.bucket_bytes)


@dataclass(frozen=True)
class Keeping:
    """The units and buffers for the parameters of some stages of a rank. It covers one stage; or all of a rank's, if
    these include the model's first and last and share a tied embedding. Inner units come first, each stage itself
    last. frozen: parameters that are whole and not trained; they are in no buffer."""

    stages: tuple[int, ...]
    units: tuple[FsdpUnit, ...]
    buffers: tuple[FlatBuffer, ...]
    frozen: tuple[str, ...] = ()


def keepings(
    model: Model, layout: Layout, stages: Sequence[int], blocks: tuple[range, ...] | None = None
) -> list[Keeping]:
    """The units and buffers of ranks with these pipeline stages. blocks: of every stage, if another program cuts
    them."""
    blocks = blocks or stage_blocks(model, layout)
    by_stage, tied = stage_parameters(model, blocks), model.tied and {0, len(blocks) - 1} <= set(stages)
    together = [tuple(stages)] if tied else [(stage,) for stage in stages]
    return [
        Keeping(
            stages=some,
            units=tuple(unit for stage in some for unit in _units(model, layout, stage, by_stage[stage])),
            buffers=tuple(_buffers(model, layout, {name for stage in some for name in by_stage[stage]})),
            frozen=_frozen(model, layout, {name for stage in some for name in by_stage[stage]}),
        )
        for some in together
    ]


def _units(model: Model, layout: Layout, stage: int, names: Sequence[str]) -> list[FsdpUnit]:
    local, parts = local_parameters(model, layout), dict[tuple[str, str], list[str]]()
    if sharing_group(layout)[1] == 1:
        return []
    parts["", "shard"] = []  # the stage itself, even if it has only blocks
    for name in names:
        number = block_of(model, name)
        block = f"{model.stack}.{number}" if number else ""
        if layout.ep > 1 and local[name].axis == "ep":
            if sharing_group(layout, expert=True)[1] > 1:
                parts.setdefault((name.rpartition(".")[0], "eshard"), []).append(name)
        else:
            parts.setdefault((block, "shard"), []).append(name)
    found = []
    for (module, group), members in parts.items():
        ranks = sharing_group(layout, expert=group == "eshard")[1]
        shares = tuple(local[name].share(ranks) for name in members)
        across = tuple(name for name in members if kept_rows(local[name].shape, 0, ranks)[0])
        padded = ranks * sum(shares)
        still = ranks * sum(s for n, s in zip(members, shares, strict=True) if n in model.frozen)
        found.append(FsdpUnit(stage, module, group, tuple(members), shares, padded, padded - still, across))
    return sorted(found, key=lambda unit: len(unit.module.split(".")) if unit.module else 0, reverse=True)


def _buffers(model: Model, layout: Layout, names: set[str]) -> list[FlatBuffer]:
    local, found = local_parameters(model, layout), []
    for expert in (False, True):
        if sharing_group(layout, expert)[1] > 1:
            continue
        (sync,) = syncs(layout, expert)
        mine = [
            n
            for n in model.parameters
            if n in names and n not in model.frozen and (layout.ep > 1 and local[n].axis == "ep") == expert
        ]
        if mine:
            shapes = tuple(local[name].shape for name in mine)
            found.append(FlatBuffer(sync.group, tuple(mine), shapes, bucket_bytes(layout)))
    return found


def _frozen(model: Model, layout: Layout, names: set[str]) -> tuple[str, ...]:
    """The frozen ones of these parameters that no ranks divide."""
    local = local_parameters(model, layout)
    return tuple(
        n
        for n in model.parameters
        if n in names
        and n in model.frozen
        and sharing_group(layout, layout.ep > 1 and local[n].axis == "ep")[1] == 1
    )


def compressed_buckets(
    model: Model, layout: Layout, stages: Sequence[int], blocks: tuple[range, ...] | None = None
) -> Iterator[tuple[str, int, tuple[Shape, ...]]]:
    """(group, its number of ranks, shapes of the parameters) of each bucket whose sum is compressed
    (schedules/compression)."""
    if layout.compress == NONE:
        return
    for keeping in keepings(model, layout, stages, blocks):
        for buffer in keeping.buffers:
            ranks = groups(layout)[buffer.group][0]
            if ranks > 1:
                yield from ((buffer.group, ranks, shapes) for shapes in buffer.bucket_shapes)


def bucket_bytes(layout: Layout) -> float:
    """Minimum bytes of fp32 gradients per bucket; infinite if there is one bucket."""
    return layout.bucket_mib * 2**20 or math.inf


@lru_cache(maxsize=1024)
def _bucket_shapes(shapes: tuple[Shape, ...], bucket_bytes: float) -> tuple[tuple[Shape, ...], ...]:
    ordered = buffer_order(shapes)
    some = buckets([math.prod(shape) for shape in ordered], bucket_bytes)
    return tuple(tuple(ordered[bucket.start : bucket.stop]) for bucket in some)


def buffer_order(parameters: Sequence[Any]) -> list[Any]:
    """Orders parameters of the module's order for a flat buffer: backward finishes roughly in reverse."""
    return list(reversed(parameters))


UPDATED = 1 << 18
"""Elements of whole parameters that an update with rounding takes at once, unless one parameter has more: few enough
that their fp32 copies (optim/updater.py) are small beside the states."""


def updated_together(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Parameters in the order of their replica, in groups of at most `UPDATED` elements: the same groups on all ranks.
    sizes: of the whole parameters."""
    some, size = list[str](), 0
    for name, elements in sizes.items():
        if some and size + elements > UPDATED:
            yield some
            some, size = [], 0
        some.append(name)
        size += elements
    if some:
        yield some
