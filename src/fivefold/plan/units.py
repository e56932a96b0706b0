"""What the data axes communicate of a rank's parameters: the units that FSDP2 gathers and scatters, and the buckets of
what is whole on every rank. From the sharding table, as `parallel/zero.py` and `parallel/data.py` take it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from fivefold.layout import Layout, index_in
from fivefold.plan.partition import stages as stages_of_model
from fivefold.plan.software import Partition
from fivefold.recipe.schema import ModelSection
from fivefold.sharding import TIED, Shape, chunk, cuts, parameters, shard_dim

BUCKET_BYTES = 25 << 20
"""Of fp32 gradients that are summed at once, at least (parallel/data.py)."""
REPLICATED = ("transform.", "norm.")
"""Prefixes of BERT's parameters that see whole sequences under sequence parallelism (parallel/tensor.py)."""


@dataclass(frozen=True)
class Local:
    """A parameter on a rank, after tensor and expert parallelism. cut: by which."""

    shape: Shape
    cut: str = ""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def share(self, ranks: int, index: int = 0) -> int:
        """Elements of the part of rank `index` of those that share it; the first has most."""
        dim = shard_dim(self.shape, ranks)
        start, stop = chunk(self.shape[dim], index, ranks)
        return (stop - start) * self.size // self.shape[dim]


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP2 gathers and scatters together, over a group of ranks. padded: their elements, each
    parameter's rows filled up to a multiple of the ranks. across: those that are not divided along their first dim."""

    group: str
    names: tuple[str, ...]
    padded: int
    across: tuple[str, ...]
    block: int | None = None
    """The block whose parameters they are; None: the stage's others."""


@dataclass(frozen=True)
class Replica:
    """Parameters that are whole on every rank of a group, with gradients in one flat buffer, summed by buckets."""

    group: str
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def buckets(self) -> int:
        """Whole parameters each, from the last to the first."""
        found, filled = 1, 0
        for size in reversed(self.sizes):
            if filled >= BUCKET_BYTES // 4:
                found, filled = found + 1, 0
            filled += size
        return found


@dataclass
class Held:
    """What a rank holds. names: of its parameters."""

    names: list[str] = field(default_factory=list)
    shared: list[Unit] = field(default_factory=list)
    replicated: list[Replica] = field(default_factory=list)


@lru_cache(maxsize=256)
def _locals(model: Any, tp: int, ep: int) -> dict[str, Local]:
    table, found = cuts(model), {}
    for name, shape in parameters(model).items():
        cut = table.get(name)
        if cut is None:
            found[name] = Local(shape)
            continue
        ranks, dim = (ep if cut.axis == "ep" else tp), cut.dim
        found[name] = Local((*shape[:dim], shape[dim] // ranks, *shape[dim + 1 :]), cut.axis)
    return found


def table(model: ModelSection, layout: Layout) -> dict[str, Local]:
    """Every parameter as a rank that has it computes with it, in the module's order."""
    hashed: Any = model
    return _locals(hashed, layout.tp, layout.ep)


def of_rank(model: ModelSection, layout: Layout, stages: Sequence[int], how: Partition) -> Held:
    """What the ranks hold that have these pipeline stages."""
    by_stage = [_names(model, layout, stage, how) for stage in stages]
    held, ends = Held([name for names in by_stage for name in names]), {0, last_stage(model, layout, how)}
    if model.tie_embeddings and len(ends) > 1 and ends <= set(stages):
        both = set(held.names)
        replicas = [[name for name in parameters(model) if name in both]]  # one tensor is in both ends
    else:
        replicas = by_stage
    local = table(model, layout)
    experts = {name for name in held.names if layout.ep > 1 and local[name].cut == "ep"}
    shards = layout.dp_shard * layout.cp if layout.zero else 1
    for names in replicas if shards == 1 else ():
        _replicate(held, model, layout, "batch", [name for name in names if name not in experts])
    for names in replicas if shards in (1, layout.ep) else ():
        _replicate(held, model, layout, "edp", [name for name in names if name in experts])
    for names in by_stage if shards > 1 else ():
        _share(held, model, layout, names, experts)
    return held


def _share(held: Held, model: ModelSection, layout: Layout, names: list[str], experts: set[str]) -> None:
    """Units of one stage: its blocks, their experts where fewer ranks share these, and the rest."""
    shards, local = layout.dp_shard * layout.cp, table(model, layout)
    parts: dict[tuple[str, int | None], list[str]] = {}
    for name in names:
        block = int(name.split(".")[1]) if name.startswith("blocks.") else None
        if name not in experts or shards > layout.ep:
            parts.setdefault(("eshard" if name in experts else "shard", block), []).append(name)
    for (group, block), members in parts.items():
        ranks = shards // layout.ep if group == "eshard" else shards
        padded = sum(local[name].share(ranks) * ranks for name in members)
        across = tuple(name for name in members if shard_dim(local[name].shape, ranks))
        held.shared.append(Unit(group, tuple(members), padded, across, block))


def _replicate(held: Held, model: ModelSection, layout: Layout, group: str, names: list[str]) -> None:
    if names:
        local = table(model, layout)
        held.replicated.append(Replica(group, tuple(local[name].size for name in names)))


def last_stage(model: ModelSection, layout: Layout, how: Partition) -> int:
    return len(stages_of_model(model, layout, how)) - 1


def _names(model: ModelSection, layout: Layout, stage: int, how: Partition) -> list[str]:
    """Parameters of a stage, in the module's order."""
    by_stage = stages_of_model(model, layout, how)
    blocks, first, last = by_stage[stage], stage == 0, stage == len(by_stage) - 1

    def has(name: str) -> bool:
        if name.startswith("blocks."):
            return int(name.split(".")[1]) in blocks
        if name == TIED:
            return first or (last and bool(model.tie_embeddings))
        return first if name.startswith("embed") else last

    return [name for name in table(model, layout) if has(name)]


def kept(model: ModelSection, layout: Layout, rank: int, names: Iterable[str]) -> int:
    """Elements of these parameters whose states a rank keeps."""
    local, shards = table(model, layout), layout.dp_shard * layout.cp if layout.zero else 1
    index = {name: index_in(layout, name, rank) if layout.zero else 0 for name in ("shard", "eshard")}
    total = 0
    for name in names:
        if local[name].cut == "ep":
            total += local[name].share(max(1, shards // layout.ep), index["eshard"])
        else:
            total += local[name].share(shards, index["shard"])
    return total


def partial(model: ModelSection, layout: Layout, rank: int, names: list[str]) -> int:
    """Elements that a rank keeps of parameters whose gradients are sums over the tensor axis: those that it does not
    cut, under sequence parallelism, as each rank has seen a piece."""
    alike = REPLICATED if model.arch == "bert" else ()
    local = table(model, layout)
    found = [n for n in names if local[n].cut != "tp" and not n.startswith(alike)]
    return kept(model, layout, rank, found)
