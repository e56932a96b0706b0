"""Bytes on each rank: states from the sharding table, activations from the operations, live microbatches from the
schedule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fivefold.layout import Layout
from fivefold.plan import operations, units
from fivefold.plan.operations import Sizes
from fivefold.plan.partition import schedule, stages
from fivefold.plan.rehearsal import Job, rehearse
from fivefold.plan.software import Partition, Software, States
from fivefold.recipe.schema import ModelSection
from fivefold.schedules.pipeline import Schedule, peak_live
from fivefold.sharding import TIED, stages_of

BREADTH_FIRST = ("gpipe", "looped_bfs")


@dataclass(frozen=True)
class Elements:
    """Numbers of elements of some parameters on a rank. computes: whole after tensor and expert parallelism; keeps: of
    those the rows that it keeps under ZeRO. largest: of the biggest parameter. experts, experts_keep: how many of both
    are routed experts', which have groups of their own."""

    computes: float = 0
    keeps: float = 0
    largest: float = 0
    experts: float = 0
    experts_keep: float = 0

    def __add__(self, other: Elements) -> Elements:
        return Elements(
            self.computes + other.computes,
            self.keeps + other.keeps,
            max(self.largest, other.largest),
            self.experts + other.experts,
            self.experts_keep + other.experts_keep,
        )

    def groups(self) -> tuple[tuple[float, float, str], tuple[float, float, str]]:
        """(computes, keeps, how its groups are called) of what is no expert, and of the experts."""
        return (
            (self.computes - self.experts, self.keeps - self.experts_keep, ""),
            (self.experts, self.experts_keep, "e"),
        )


@dataclass(frozen=True)
class Memory:
    """Bytes on the first rank of a pipeline position (the one with most where ranks differ)."""

    params: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        return self.params + self.gradients + self.optimizer + self.activations + self.buffers

    def as_json(self) -> dict[str, int]:
        names = ("params", "gradients", "optimizer", "activations", "buffers", "total")
        return {name: round(getattr(self, name)) for name in names}


def scattered_once(layout: Layout) -> bool:
    """Whether gradients add up whole on each rank, and are scattered in the last microbatch only: under ZeRO 1, and
    under every stage of it in a pipeline (parallel/zero.py)."""
    return layout.zero == 1 or (layout.zero > 1 and layout.pp > 1)


def state_bytes(
    bytes_a_parameter: States,
    zero: int,
    computes: float,
    keeps: float,
    microbatches: int = 2,
    pipeline: bool = False,
) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer: each is kept whole (`computes` elements) below the ZeRO stage that
    shares it, and as `keeps` elements from there on (arXiv 1910.02054, figure 1); where weights are cast (see
    `States`), as FSDP2 has them, with gradients that add up whole in a pipeline (see `scattered_once`)."""
    b = bytes_a_parameter
    if b.cast and zero:
        whole = computes if (zero == 1 or pipeline) and microbatches > 1 else 0.0
        gathered = computes if zero < 3 else 0.0
        own = 0.0 if b.master else b.working * keeps
        return b.working * gathered + own, b.gradient * (keeps + whole), b.optimizer * keeps
    return (
        b.working * (keeps if zero >= 3 else computes),
        b.gradient * (keeps if zero >= 2 else computes),
        b.optimizer * (keeps if zero >= 1 else computes),
    )


def count(model: ModelSection, layout: Layout) -> tuple[list[Elements], Elements, Elements, Elements]:
    """Elements of each block, of what comes before them, of what comes behind, and of the last stage's copy of a tied
    embedding. Of the first rank, which has most."""
    kinds: dict[str, Elements] = {}
    blocks = [Elements() for _ in range(model.layers)]
    before = behind = Elements()
    for name, local in units.table(model, layout).items():
        expert = local.cut == "ep"
        shards = layout.dp_shard * layout.cp // (layout.ep if expert else 1) if layout.zero else 1
        size, part = local.size, local.share(shards)
        own = Elements(size, part, size, size if expert else 0, part if expert else 0)
        kinds[name] = own
        if name.startswith("blocks."):
            number = int(name.split(".")[1])
            blocks[number] += own
        elif name.startswith("embed"):
            before += own
        else:
            behind += own
    return blocks, before, behind, kinds[TIED] if model.tie_embeddings else Elements()


def rank_elements(model: ModelSection, layout: Layout, how: Partition = "balanced") -> list[Elements]:
    """Elements on the ranks of each position in the pipeline."""
    blocks, before, behind, tied = elements(model, layout)
    by_stage = stages(model, layout, how)
    found = []
    for position in range(layout.pp):
        total, mine = Elements(), stages_of(layout, position)
        for stage in mine:
            for number in by_stage[stage]:
                total += blocks[number]
            if stage == 0:
                total += before
            if stage == len(by_stage) - 1:
                total += behind + (Elements() if 0 in mine else tied)
        found.append(total)
    return found


def activations(
    model: ModelSection,
    layout: Layout,
    sizes: Sizes,
    software: Software,
    schedule: Schedule | None,
    times: int = 1,
) -> list[float]:
    """Bytes of activations at the peak, of each position in the pipeline: what live microbatches keep (`times` as much
    as in the schedule), and what the backward of a block or of the loss holds besides."""
    kinds = {mixed: operations.block(sizes, software, mixed) for mixed in (False, True)}
    first, last = operations.begin(sizes, software), operations.end(sizes, software)
    keeps = {m: operations.kept(ops, layout.recompute, software) for m, ops in kinds.items()}
    by_stage = stages(model, layout, software.partition)
    stage_bytes = [sum(keeps[operations.is_mixed(model, i)] for i in part) for part in by_stage]
    stage_bytes[0] += operations.kept(first, layout.recompute, software)
    stage_bytes[-1] += operations.kept(last, "none", software)
    largest = max(keeps, key=lambda mixed: mixed is operations.is_mixed(model, model.layers - 1))
    block = kinds[largest]
    again = operations.kept(block, "none", software) - keeps[largest] if layout.recompute != "none" else 0.0
    inside = max(op.workspace for op in block) + sizes.n * model.dim * sizes.e + again
    loss = max(op.workspace for op in last)
    if schedule is None:
        return [stage_bytes[0] + max(inside, loss)]
    live = [times * size for size in peak_live(schedule, stage_bytes)]
    owner = schedule.rank_of[-1]
    return [
        bytes_ + (max(inside, loss) if rank == owner else inside)
        + 2 * 2 * sizes.n * model.dim * sizes.e  # one activation and one gradient arriving, one of each leaving
        for rank, bytes_ in enumerate(live)
    ]  # fmt: skip


def buffers(model: ModelSection, layout: Layout, own: Elements, b: States) -> float:
    """Weights that ZeRO gathers and gradients on their way: two blocks are there at once."""
    blocks, before, behind, _ = elements(model, layout)
    largest = max(block.computes for block in blocks)
    shards = layout.dp_shard * layout.cp
    if not layout.zero or shards == 1:
        return own.largest * b.working  # a gradient before it is added to its sum
    gathered = 2 * largest * b.working if layout.zero == 3 else 0.0
    if layout.zero == 3:
        gathered += max(before.computes, behind.computes) * b.working
    reduced = (2 * largest if layout.zero >= 2 else largest) * b.reduce * (1 + 1 / shards)
    return gathered + reduced


def predict(
    model: ModelSection,
    layout: Layout,
    sizes: Sizes,
    software: Software,
    dtype: str,
    microbatches: int,
    extra: float = 0.0,
) -> list[Memory]:
    """Bytes of each position in the pipeline. `extra`: buffers besides."""
    if software.memory == "rehearsal":
        job = Job(model, layout, sizes, software, dtype, microbatches)
        peaks = (rehearse(job, layout.rank({"pp": position})).at_peak for position in range(layout.pp))
        return [Memory(**{**found, "buffers": found["buffers"] + extra}) for found in peaks]
    b = software.states[dtype]
    schedule = live_schedule(layout, microbatches)
    found = []
    times = microbatches if schedule and layout.schedule in BREADTH_FIRST else 1
    acts = activations(model, layout, sizes, software, schedule, times)
    for own, kept in zip(rank_elements(model, layout, software.partition), acts, strict=True):
        weights, gradients, optimizer = state_bytes(
            b, layout.zero, own.computes, own.keeps, microbatches, layout.pp > 1
        )
        found.append(Memory(weights, gradients, optimizer, kept, buffers(model, layout, own, b) + extra))
    return found


def live_schedule(layout: Layout, microbatches: int) -> Schedule | None:
    """The schedule with as many microbatches as can be live at once: more change no rank's peak. Of schedules that go
    breadth first, in which all are live, with one."""
    if layout.pp == 1:
        return None
    enough = 2 * layout.pp * max(2, layout.virtual_stages)
    if layout.schedule in BREADTH_FIRST:
        microbatches = 1
    elif microbatches % layout.pp == 0:
        microbatches = min(microbatches, enough)
    return schedule(layout.schedule, layout.pp, microbatches, layout.virtual_stages)


def elements(model: ModelSection, layout: Layout) -> tuple[list[Elements], Elements, Elements, Elements]:
    shards = layout.dp_shard * layout.cp if layout.zero else 1
    hashed: Any = model
    return _count(hashed, layout.tp, layout.ep, shards, layout.zero > 0)


@lru_cache(maxsize=4096)
def _count(
    model: ModelSection, tp: int, ep: int, shards: int, shared: bool
) -> tuple[list[Elements], Elements, Elements, Elements]:
    return count(model, Layout(tp=tp, ep=ep, dp_shard=shards, zero=int(shared)))
