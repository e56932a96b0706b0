"""Layout: how many ranks each axis of parallelism has, and which rank sits where. No torch.

The axes, outermost first: `pp, dp_replicate, dp_shard, cp, tp`. Neighbouring ranks differ in `tp`, the axis that
communicates most, so it stays within a machine. `pp` communicates least and spans machines. `ep` is not an axis of its
own: for expert weights it divides the data and context axes again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from fivefold.schedules.collectives.registry import AUTO
from fivefold.schedules.compression import NONE
from fivefold.schedules.pipeline import DEFAULT, stages_per_rank
from fivefold.sharding.shares import BUCKET_BYTES
from fivefold.sharding.tiers import NOT_OFFLOADED

T = TypeVar("T")
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


class Counts:
    """What follows from the sizes of the axes, for a `Layout` and for the `[layout]` of a recipe."""

    @property
    def dp(self: Any) -> int:
        """Number of ranks that compute different sequences: `dp_replicate x dp_shard`."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks(self: Any) -> int:
        """Number of ranks: the product of the axes."""
        return self.pp * self.dp * self.cp * self.tp


@dataclass(frozen=True)
class Layout(Counts):
    """The sizes of the axes and how they are used. The fields are those of a recipe's `[layout]`."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    cp_method: str = "ring"
    tp: int = 1
    ep: int = 1
    zero: int = 0
    sp: bool = False
    sp_regather: bool = False
    schedule: str = DEFAULT
    virtual_stages: int = 1
    microbatches: int | None = None
    recompute: str = "none"
    offload: str = NOT_OFFLOADED
    offload_dir: str = ""
    compress: str = NONE
    compress_after: int | None = None
    all_reduce: str = AUTO
    zeropp: str = NONE
    ranks_per_node: int | None = None
    expert_chunks: int = 1
    bucket_mib: float = BUCKET_BYTES / 2**20

    @classmethod
    def from_recipe(cls, section: Any) -> Layout:
        """section: the `[layout]` of a recipe."""
        return cls(**section.model_dump())

    @property
    def shards(self) -> int:
        """Number of ranks that share the states of a parameter; 1 without ZeRO."""
        return self.dp_shard * self.cp if self.zero else 1

    @property
    def in_step(self) -> bool:
        """True if ranks with different sequences exchange weights or rows in every microbatch. Then all compute equally
        many: empty ones follow those of a smaller share."""
        return self.zero > 0 or self.ep > 1

    @property
    def stages_per_rank(self) -> int:
        """Number of pipeline stages per rank: `virtual_stages`, or the number that the schedule requires; 1 without a
        pipeline."""
        return stages_per_rank(self.schedule, self.virtual_stages) if self.pp > 1 else 1

    @property
    def divided(self) -> bool:
        """True if no rank holds and computes the whole model by itself."""
        return self.ranks > self.dp_replicate or self.ep > 1

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each axis, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    def coordinates(self, rank: int) -> dict[str, int]:
        """The index of a rank on each axis. Inverse of `rank`."""
        assert 0 <= rank < self.ranks, f"rank {rank} of {self.ranks}"
        place = {}
        for axis, size in reversed(self.sizes.items()):
            rank, place[axis] = divmod(rank, size)
        return {axis: place[axis] for axis in AXES}

    def rank(self, coordinates: dict[str, int]) -> int:
        """The rank at these indices; an axis without an index counts as 0. Inverse of `coordinates`."""
        rank = 0
        for axis, size in self.sizes.items():
            index = coordinates.get(axis, 0)
            assert 0 <= index < size, f"{axis} index {index} of {size}"
            rank = rank * size + index
        return rank


def changed(one: T, **fields: Any) -> T:
    """`dataclasses.replace` for a frozen dataclass of plain fields, but quick: a search calls it 100,000 times."""
    new = object.__new__(type(one))
    new.__dict__.update(one.__dict__, **fields)
    return new


def groups(layout: Layout) -> dict[str, tuple[int, int]]:
    """Size and stride of every process group. The group of rank r is r + stride x (i - index), i = 0 .. size - 1,
    with index = r // stride % size.

    Groups with the same ranks are counted under the first of their names (`first_names`).
    """
    return _groups(tuple(layout.sizes.values()), layout.ep, layout.ranks_per_node or layout.ranks)


@lru_cache(maxsize=2**14)
def _groups(sizes: tuple[int, ...], ep: int, per_node: int) -> dict[str, tuple[int, int]]:
    pp, dp_replicate, dp_shard, cp, tp = sizes
    dp, shard, batch = dp_replicate * dp_shard, dp_shard * cp, dp_replicate * dp_shard * cp
    inside = max(1, min(shard, per_node // tp))
    return {
        "pp": (pp, batch * tp),
        "tp": (tp, 1),
        "cp": (cp, tp),
        "shard": (shard, tp),  # ranks that share states: FSDP's group
        "replicate": (dp_replicate, shard * tp),
        "dp": (dp, cp * tp),  # ranks with different sequences
        "batch": (batch, tp),  # ranks with different tokens: gradients are summed over them
        "all": (pp * batch * tp, 1),
        # Expert weights divide "batch" again: neighbours hold different experts.
        "ep": (ep, tp),
        "edp": (
            max(1, batch // ep),
            ep * tp,
        ),  # ranks with the same experts: their gradients are summed over them
        "eshard": (shard // ep if shard % ep == 0 else 1, ep * tp),  # those of "edp" that share states
        # Those of "shard" on one node, and those with the same place on each node.
        "inside": (inside, tp),
        "across": (shard // inside, inside * tp),
    }


GROUP_NAMES = tuple(_groups((1,) * len(AXES), 1, 1))


def first_names(layout: Layout) -> dict[str, str]:
    """The name under which each group's messages are counted: the first of all groups with the same ranks."""
    first: dict[tuple[int, int], str] = {}
    return {name: first.setdefault(shape, name) for name, shape in groups(layout).items()}


def index_in(layout: Layout, group: str, rank: int) -> int:
    """A rank's index within its group."""
    size, stride = groups(layout)[group]
    return rank // stride % size


def group_of(layout: Layout, group: str, rank: int) -> list[int]:
    """The ranks of a rank's group, in the order of their index."""
    size, stride = groups(layout)[group]
    first = rank - rank // stride % size * stride
    return list(range(first, first + size * stride, stride))


def on_node(layout: Layout, group: str, per_node: int) -> int:
    """How many ranks of a group each node has, if nodes have `per_node` ranks."""
    size, stride = groups(layout)[group]
    return max(1, min(size, per_node // stride))


def summing_groups(layout: Layout) -> list[str]:
    """The groups of more than one rank that sum gradients by all-reduce: without ZeRO the ranks with different tokens,
    and those with the same experts; a hybrid's replicas."""
    names = ["replicate" if layout.shards > 1 else "batch"]
    if layout.ep > 1:
        names.append("replicate" if layout.shards > layout.ep else "edp")
    return [name for name in dict.fromkeys(names) if groups(layout)[name][0] > 1]
