"""Layout: how many ranks each axis of parallelism has, which rank sits where, the layout as text, and how a batch is
shared between data-parallel ranks. No torch.

The axes, outermost first: `pp, dp_replicate, dp_shard, cp, tp`. Neighbouring ranks differ in `tp`, the axis that
communicates most, so it stays within a machine. `pp` communicates least and spans machines. `ep` is not an axis of its
own: for expert weights it divides the data and context axes again, and with `ep_fold` the tensor axis, too (MoE
parallel folding, arXiv 2504.14960).

Data-parallel ranks take whole microbatches, as equally many as can be. Every layout computes the microbatches of one
process, so a mean over them is the same mean for any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any, TypeVar

from fivefold.errors import LONGEST_WORD, UserError, did_you_mean, shortened
from fivefold.schedules.collectives.registry import AUTO, LIBRARY
from fivefold.schedules.compression import NONE
from fivefold.schedules.pipeline import (
    DEFAULT,
    SCHEDULES,
    TUNED,
    Schedule,
    build,
    few,
    shown,
    splits_backward,
    stages_per_rank,
)
from fivefold.sharding.tiers import BESIDE, EARLY, NOT_OFFLOADED, OFFLOADS, WINDOW, partitions

T = TypeVar("T")
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
USUAL = ("dp", "pp", "cp", "tp", "ep", "zero", "schedule", "recompute")  # those that most people want
BUCKET_BYTES = 25 << 20
"""Minimum bytes of fp32 gradients per bucket, unless `layout.bucket_mib` says otherwise."""
ELSEWHERE = {"fsdp": "dp={},zero=3", "ddp": "dp={}", "tensor": "tp={}"}
"""Names of axes in other programs, and what they are here."""


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

    @property
    def early(self: Any) -> bool:
        """True if updates run beside backward: blocks change before the step is judged."""
        return self.offload_update == EARLY and OFFLOADS[self.offload].streams


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
    tp_chunks: int = 1
    schedule: str = DEFAULT
    virtual_stages: int = 1
    microbatches: int | None = None
    recompute: str = "none"
    offload: str = NOT_OFFLOADED
    offload_dir: str = ""
    offload_window: int = WINDOW
    offload_update: str = BESIDE
    compress: str = NONE
    compress_after: int | None = None
    all_reduce: str = AUTO
    all_gather: str = LIBRARY
    reduce_scatter: str = LIBRARY
    zeropp: str = NONE
    ranks_per_node: int | None = None
    ep_fold: bool = False
    expert_chunks: int = 1
    expert_buffer: float = 0.0
    bucket_mib: float = BUCKET_BYTES / 2**20
    round_microbatches: int | None = None
    zb_costs: str = ""
    zb_live: int | None = None
    bare_ends: bool = False

    @classmethod
    def from_recipe(cls, section: Any) -> Layout:
        """section: the `[layout]` of a recipe."""
        return cls(**section.model_dump())

    def chunks_of(self, tokens: int) -> int:
        """As many of its `tp_chunks` as divide the tokens that a rank has of a sequence; 1 without `sp`."""
        return math.gcd(self.tp_chunks, tokens // (self.cp * self.tp)) if self.sp else 1

    @property
    def shards(self) -> int:
        """Number of ranks that share the states of a parameter; 1 without ZeRO."""
        return self.dp_shard * self.cp if self.zero else 1

    @property
    def folded(self) -> int:
        """Number of tensor-parallel ranks that the expert axis takes in: they have other experts, or the same ones."""
        return self.tp if self.ep_fold and self.ep > 1 else 1

    @property
    def expert_shards(self) -> int:
        """Number of ranks that share the states of an expert; 1 without ZeRO."""
        return max(1, self.shards * self.folded // self.ep) if self.zero else 1

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

    def pipeline(self, microbatches: int) -> Schedule:
        """The pipeline schedule of a step with so many microbatches: what is run, priced and drawn. Raises UserError:
        names the field that the schedule does not allow."""
        return _pipeline(self.schedule, self.pp, microbatches, self.virtual_stages, **self.tuned)

    @property
    def tuned(self) -> dict[str, Any]:
        """The fields that only some schedules take."""
        return {field: getattr(self, field) for field in TUNED}

    def few(self, microbatches: int, rounds: int | None = None) -> int:
        """Fewer microbatches that a pipeline holds as all of them are (`schedules.pipeline.few`)."""
        if SCHEDULES[self.schedule].varies:
            return microbatches
        return few(microbatches, self.pp, self.round_microbatches, *(() if rounds is None else (rounds,)))

    def shown(self, microbatches: int) -> int:
        """Microbatches that show how the pipeline fills and drains (`schedules.pipeline.shown`)."""
        if SCHEDULES[self.schedule].varies:
            return microbatches
        each = max(1, microbatches // self.copies)
        return min(microbatches, self.copies * shown(each, self.pp, self.round_microbatches))

    @property
    def fewest_blocks(self) -> int:
        """Fewest blocks that the pipeline's stages need: one each, unless the ends may have none."""
        return max(1, self.pp * self.stages_per_rank // self.copies - 2 * (self.bare_ends and self.pp > 1))

    @property
    def copies(self) -> int:
        """Copies of the model in a pipeline, on the same ranks."""
        return SCHEDULES[self.schedule].copies if self.pp > 1 else 1

    @property
    def splits_backward(self) -> bool:
        """True if the pipeline computes weight gradients separately (I and W)."""
        return self.pp > 1 and splits_backward(self.schedule, self.pp, self.stages_per_rank)

    def compiles(self, experts: bool, recompute: str) -> bool:
        """True if the trainer compiles a block on a GPU; any other runs operation by operation. experts: it has some.
        recompute: its mode. PyTorch compiles no checkpoint around a break, as where rows travel to experts, and can
        trace neither the queue of weight gradients of a split backward, nor inputs that are kept in parts."""
        breaks = recompute == "full" and experts and self.ep > 1
        parts = partitions(self.offload, recompute, self.tp, self.sp)
        return not (self.splits_backward or breaks or parts)

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


_pipeline = lru_cache(maxsize=256)(build)


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
    node = layout.ranks_per_node or layout.ranks
    return _groups(tuple(layout.sizes.values()), layout.ep, layout.folded, node)


@lru_cache(maxsize=2**14)
def _groups(sizes: tuple[int, ...], ep: int, folded: int, per_node: int) -> dict[str, tuple[int, int]]:
    pp, dp_replicate, dp_shard, cp, tp = sizes
    dp, shard, batch = dp_replicate * dp_shard, dp_shard * cp, dp_replicate * dp_shard * cp
    inside = max(1, min(shard, per_node // tp))
    stride, some, sharers = tp // folded, batch * folded, shard * folded  # of ranks that divide experts
    return {
        "pp": (pp, batch * tp),
        "tp": (tp, 1),
        "cp": (cp, tp),
        "shard": (shard, tp),  # ranks that share states: FSDP's group
        "replicate": (dp_replicate, shard * tp),
        "dp": (dp, cp * tp),  # ranks with different sequences
        "batch": (batch, tp),  # ranks with different tokens: gradients are summed over them
        "all": (pp * batch * tp, 1),
        # Expert weights divide "batch" again, or "tp" and "batch": neighbours hold different experts.
        "ep": (ep, stride),
        "edp": (max(1, some // ep), ep * stride),  # ranks with the same experts sum gradients over them
        "eshard": (
            sharers // ep if sharers % ep == 0 else 1,
            ep * stride,
        ),  # of "edp", those that share states
        # Those of "shard" on one node, and those with the same place on each node.
        "inside": (inside, tp),
        "across": (shard // inside, inside * tp),
    }


GROUP_NAMES = tuple(_groups((1,) * len(AXES), 1, 1, 1))


def first_names(layout: Layout) -> dict[str, str]:
    """The name under which each group's messages are counted: the first of all groups with the same ranks."""
    first: dict[tuple[int, int], str] = {}
    return {name: first.setdefault(shape, name) for name, shape in groups(layout).items()}


def index_in(layout: Layout, group: str, rank: int) -> int:
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
        names.append("replicate" if layout.expert_shards > 1 else "edp")
    return [name for name in dict.fromkeys(names) if groups(layout)[name][0] > 1]


def share(microbatches: int, index: int, ranks: int) -> range:
    """The microbatches of data-parallel rank `index`: neighbours, and at most one more than any other rank has."""
    return range(microbatches * index // ranks, microbatches * (index + 1) // ranks)


def largest(microbatches: int, ranks: int) -> int:
    """Microbatches of the rank that has most. A step takes as long as this rank."""
    return -(-microbatches // ranks)


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def largest_divisor(number: int, most: int) -> int:
    return max(divisor for divisor in divisors(number) if divisor <= most)


def buckets(sizes: Sequence[int], bucket_bytes: float = BUCKET_BYTES) -> list[range]:
    """Cuts a buffer into buckets of whole, consecutive parameters. All but the last have at least `bucket_bytes` of
    fp32 gradients.

    sizes: elements of each parameter in the order of the flat buffer. Returns their indices.
    """
    found, filled = [range(0)], 0
    for index, size in enumerate(sizes):
        if 4 * filled >= bucket_bytes:
            found.append(range(index, index))
            filled = 0
        found[-1] = range(found[-1].start, index + 1)
        filled += size
    return found


def parse(text: str) -> dict[str, int | float | bool | str]:
    """Reads a layout such as `dp=2,tp=2,zero=1` into fields of `[layout]`; returns only the fields that are named.

    `dp=N` means N replicas (`dp_replicate`) with `zero=0`, and N ranks that share states (`dp_shard`) with `zero>=1`.
    Raises UserError: listing every part that is not understood."""
    defaults = asdict(Layout())
    found: dict[str, int | float | bool | str] = {}
    problems = []
    parts: list[str] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        if parts and "=" not in part and parts[-1].partition("=")[0].strip() == "zeropp":
            parts[-1] += f",{part}"  # of the list of `zeropp`
        else:
            parts.append(part)
    for whole in parts:
        part = shortened(whole, LONGEST_WORD)
        key, equals, value = (p.strip() for p in part.partition("="))
        if not equals or not value:
            problems.append(f"'{part}' is not of the form key=value")
        elif "=" in value:
            problems.append(f"'{part}': parts are separated by commas: {','.join(part.split())}")
        elif key in ELSEWHERE:
            problems.append(f"'{key}' is not an axis here; did you mean '{ELSEWHERE[key].format(value)}'?")
        elif key != "dp" and key not in defaults:
            problems.append(f"'{key}' is not an axis or option{did_you_mean(key, defaults)}")
        elif key in found:
            problems.append(f"'{key}' is given twice")
        else:
            try:
                found[key] = _value(value, defaults.get(key, 1))
            except ValueError as error:
                problems.append(f"'{part}': {error}")
    if "dp" in found:
        if "dp_replicate" in found or "dp_shard" in found:
            problems.append("'dp' stands for dp_replicate or dp_shard: give either dp or those")
        found["dp_shard" if found.get("zero", 0) else "dp_replicate"] = found.pop("dp")
    if problems:
        more = f"{len(defaults) - len(USUAL) + 1} more: `fivefold check quickstart --explain`"
        known = f"(keys: {', '.join(USUAL)}; {more})"
        raise UserError(f"layout '{shortened(text, 2 * LONGEST_WORD)}': {'; '.join(problems)} {known}")
    return found


def _value(text: str, default: int | float | bool | str | None) -> int | float | bool | str:
    """Reads one value in the type of its default (None stands for an optional integer)."""
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise ValueError("must be true or false")
        return text.lower() == "true"
    if isinstance(default, str):
        return text
    if isinstance(default, float):
        try:
            return float(text)
        except ValueError:
            raise ValueError("must be a number") from None
    if not text.isascii() or not text.isdigit():
        raise ValueError("must be a whole number")
    return int(text)


def to_text(layout: Layout) -> str:
    """Formats the layout as `parse` reads it, without defaults: `dp=4,tp=2,zero=3`. One rank is `dp=1`."""
    parts = {f.name: getattr(layout, f.name) for f in fields(layout) if getattr(layout, f.name) != f.default}
    name = "dp_shard" if layout.zero else "dp_replicate"
    if name in parts and not ("dp_replicate" in parts and "dp_shard" in parts):
        parts = {"dp" if key == name else key: value for key, value in parts.items()}
    words = {
        key: f"{value:g}" if isinstance(value, float) else str(value).lower() for key, value in parts.items()
    }
    text = ",".join(f"{key}={value}" for key, value in words.items())
    return text or "dp=1"


def describe(layout: Layout) -> str:
    """One line for people: `8 ranks: dp_shard 4 x tp 2, ZeRO 3, recompute full`."""
    axes = " x ".join(f"{axis} {size}" for axis, size in layout.sizes.items() if size > 1)
    words = [f"{layout.ranks} rank{'s' * (layout.ranks > 1)}" + (f": {axes}" if axes else "")]
    if layout.ep > 1:
        words.append(f"ep {layout.ep}" + f" in {layout.expert_chunks} chunks" * (layout.expert_chunks > 1))
        words[-1] += " folded with tp" * (layout.folded > 1)
        words[-1] += f" with room for {layout.expert_buffer:g} x the rows" * (layout.expert_buffer > 0)
    if layout.zero:
        words.append(f"ZeRO {layout.zero}")
    if layout.cp > 1:
        words.append(f"context by {layout.cp_method}")
    if layout.sp:
        words.append("sequence parallel" + ", gathered again in backward" * layout.sp_regather)
        words += [f"linear layers in {layout.tp_chunks} chunks"] * (layout.tp_chunks > 1)
    if layout.pp > 1:
        stages = f"{layout.stages_per_rank} stage{'s' * (layout.stages_per_rank > 1)}"
        rounds = f" in rounds of {layout.round_microbatches} microbatches" * bool(layout.round_microbatches)
        words.append(f"schedule {layout.schedule} with {stages} per rank{rounds}")
        words += ["ends without blocks"] * layout.bare_ends
    if layout.recompute != "none":
        words.append(f"recompute {layout.recompute}")
    if layout.offload != NOT_OFFLOADED:
        window = f", {layout.offload_window or 'planned'} blocks at once" * (
            OFFLOADS[layout.offload].working != "device"
        )
        words.append(f"offload {layout.offload}{window}{', updated early' * layout.early}")
    if layout.all_reduce != AUTO:
        words.append(f"gradients summed by {layout.all_reduce}")
    if layout.all_gather != LIBRARY:
        words.append(f"weights gathered by {layout.all_gather}")
    if layout.reduce_scatter != LIBRARY:
        words.append(f"gradients scattered by {layout.reduce_scatter}")
    if layout.compress != NONE:
        after = f" after step {layout.compress_after}" if layout.compress_after else ""
        words.append(f"gradients compressed by {layout.compress}{after}")
    if layout.zeropp != NONE:
        words.append(f"ZeRO++ with {layout.zeropp}")
    if layout.bucket_mib != BUCKET_BYTES / 2**20:
        words.append(
            f"buckets of {layout.bucket_mib:g} MiB" if layout.bucket_mib else "gradients in one message"
        )
    return ", ".join(words)


def equation(layout: Layout) -> str:
    """`pp 1 x dp_replicate 1 x dp_shard 4 x cp 1 x tp 2 = 8 ranks`."""
    axes = " x ".join(f"{axis} {size}" for axis, size in layout.sizes.items())
    return f"{axes} = {layout.ranks} rank{'s' * (layout.ranks > 1)}"
