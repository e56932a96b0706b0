"""Layout: how many ranks each axis of parallelism has, and which rank sits where. No torch.

The axes, outermost first: `pp, dp_replicate, dp_shard, cp, tp`. Neighbouring ranks differ in `tp`, the axis that
communicates most, so it stays within a machine. `pp` communicates least and spans machines. `ep` is not an axis of its
own: for expert weights it divides the data and context axes again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from itertools import combinations, islice
from typing import Any, Protocol

from fivefold.errors import LONGEST_WORD, UserError, did_you_mean, shortened
from fivefold.schedules.collectives import choose
from fivefold.schedules.collectives.choose import ALL_REDUCES, AUTO
from fivefold.schedules.compression import NONE, problem
from fivefold.schedules.pipeline import DEFAULT, SCHEDULES, stages_per_rank
from fivefold.spread.buckets import BUCKET_BYTES
from fivefold.spread.tiers import NOT_OFFLOADED, OFFLOADS
from fivefold.spread.zeropp import zeropp

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
MOST_RANKS = 1_000_000
"""Ranks of a layout: ten times as many as the largest run had so far."""
MANY_DIVISORS = 40
"""Numbers of ranks with more divisors can be divided between the axes in more than 10,000 ways."""


class LayoutFields(Protocol):
    """The `[layout]` section of a recipe. It has the fields of `Layout`."""

    def model_dump(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Layout:
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
    def from_recipe(cls, section: LayoutFields) -> Layout:
        return cls(**section.model_dump())

    @property
    def ranks(self) -> int:
        """Number of ranks: the product of the axes."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def shards(self) -> int:
        """Number of ranks that share the states of a parameter; 1 without ZeRO."""
        return self.dp_shard * self.cp if self.zero else 1

    @property
    def dp(self) -> int:
        """Number of ranks that compute different sequences: `dp_replicate x dp_shard`."""
        return self.dp_replicate * self.dp_shard

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


def on_nodes(layout: Layout, per_node: int) -> Layout:
    """The layout on nodes of so many ranks, unless it says how many. Only ZeRO++ depends on it.

    Raises:
        UserError: ZeRO++ would not fill the nodes evenly.
    """
    if layout.zeropp == NONE:
        return layout
    found = layout if layout.ranks_per_node else replace(layout, ranks_per_node=per_node)
    if message := node_problem(found):
        raise UserError(f"layout '{to_text(layout)}': {message}")
    return found


def node_problem(layout: Layout) -> str:
    """Says why the ranks that share states do not fill nodes evenly; "" if they do."""
    node, shard = layout.ranks_per_node or layout.ranks, groups(layout)["shard"][0]
    inside = groups(layout)["inside"][0]
    if shard % inside == 0 and (inside == 1 or layout.ranks <= node or node % (inside * layout.tp) == 0):
        return ""
    apart = f" with {layout.tp} tensor-parallel ranks each" if layout.tp > 1 else ""
    return (
        f"zeropp={layout.zeropp} shares states evenly over nodes, but {shard} ranks{apart} share them and a node has "
        f"{node} (ranks_per_node)"
    )


def summing_groups(layout: Layout) -> list[str]:
    """The groups of more than one rank that sum gradients by all-reduce: without ZeRO the ranks with different tokens,
    and those with the same experts; a hybrid's replicas."""
    names = ["replicate" if layout.shards > 1 else "batch"]
    if layout.ep > 1:
        names.append("replicate" if layout.shards > layout.ep else "edp")
    return [name for name in dict.fromkeys(names) if groups(layout)[name][0] > 1]


def parse(text: str) -> dict[str, int | float | bool | str]:
    """Reads a layout such as `dp=2,tp=2,zero=1` into fields of `[layout]`; returns only the fields that are named.

    `dp=N` means N replicas (`dp_replicate`) with `zero=0`, and N ranks that share states (`dp_shard`) with
    `zero>=1`.

    Raises:
        UserError: listing every part that is not understood.
    """
    defaults = asdict(Layout())
    found: dict[str, int | float | bool | str] = {}
    problems = []
    for whole in _parts(text):
        part = shortened(whole, LONGEST_WORD)
        key, equals, value = (p.strip() for p in part.partition("="))
        if not equals or not value:
            problems.append(f"'{part}' is not of the form key=value")
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
        keys = ", ".join(["dp", *defaults])
        raise UserError(f"layout '{shortened(text, 2 * LONGEST_WORD)}': {'; '.join(problems)} (keys: {keys})")
    return found


def _parts(text: str) -> list[str]:
    """Splits a layout at its commas, except at those within the list of `zeropp`."""
    found: list[str] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        if found and "=" not in part and found[-1].partition("=")[0].strip() == "zeropp":
            found[-1] += f",{part}"
        else:
            found.append(part)
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
    if layout.zero:
        words.append(f"ZeRO {layout.zero}")
    if layout.cp > 1:
        words.append(f"context by {layout.cp_method}")
    if layout.sp:
        words.append("sequence parallel" + ", gathered again in backward" * layout.sp_regather)
    if layout.pp > 1:
        words.append(f"schedule {layout.schedule} with {layout.stages_per_rank} stage(s) per rank")
    if layout.recompute != "none":
        words.append(f"recompute {layout.recompute}")
    if layout.offload != NOT_OFFLOADED:
        words.append(f"offload {layout.offload}")
    if layout.all_reduce != AUTO:
        words.append(f"gradients summed by {layout.all_reduce}")
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


def problems(layout: Layout) -> Iterator[tuple[set[str], str]]:
    """Yields the errors of a layout that do not depend on the model: (fields, message)."""
    if layout.ranks > MOST_RANKS:
        used = [axis for axis in AXES if getattr(layout, axis) > 1]
        yield {*used}, f"{' x '.join(used)} = {layout.ranks:,} ranks; at most {MOST_RANKS:,}"
        return
    if layout.dp_shard > 1 and layout.zero == 0:
        yield (
            {"dp_shard", "zero"},
            f"dp_shard={layout.dp_shard} shards states between ranks: it needs zero=1, 2 or 3",
        )
    if layout.zero and layout.ranks > 1 and layout.dp_shard * layout.cp == 1:
        yield (
            {"zero", "dp_shard", "cp"},
            f"zero={layout.zero} shards states between ranks: it needs dp_shard > 1 (or cp > 1)",
        )
    if (layout.dp * layout.cp) % layout.ep:
        yield (
            {"ep", "dp_replicate", "dp_shard", "cp"},
            f"ep={layout.ep} must divide dp_replicate x dp_shard x cp = {layout.dp * layout.cp}",
        )
    shard = layout.dp_shard * layout.cp
    if layout.zero and shard % layout.ep:
        yield (
            {"ep", "zero", "dp_shard", "cp"},
            f"with zero={layout.zero}, ep={layout.ep} must divide dp_shard x cp = {shard}",
        )
    if layout.sp and layout.tp == 1:
        yield {"sp", "tp"}, "sp=true cuts the sequence between tensor-parallel ranks: it needs tp > 1"
    if layout.sp_regather and not layout.sp:
        yield {"sp_regather", "sp"}, "sp_regather=true gathers what sp has cut: it needs sp=true"
    if message := problem(layout.compress):
        yield {"compress"}, message
    elif layout.compress != NONE and layout.zero:
        yield (
            {"compress", "zero"},
            f"compress={layout.compress} sums whole gradients of replicas: it needs zero=0, not zero={layout.zero}",
        )
    yield from _zeropp_problems(layout)
    yield from _offload_problems(layout)
    if layout.all_reduce not in ALL_REDUCES:
        near = did_you_mean(layout.all_reduce, ALL_REDUCES)
        yield (
            {"all_reduce"},
            f"all_reduce={layout.all_reduce} is unknown{near} (valid: {', '.join(ALL_REDUCES)})",
        )
    else:
        for name in summing_groups(layout):
            if message := choose.problem(layout.all_reduce, groups(layout)[name][0]):
                yield {"all_reduce", "dp_replicate", "dp_shard", "cp", "ep"}, f"all_reduce: {message}"
    try:
        if layout.pp > 1 or layout.schedule not in SCHEDULES:
            stages_per_rank(layout.schedule, layout.virtual_stages)
    except UserError as error:
        yield {"schedule", "virtual_stages"}, str(error).removeprefix("layout.")


def _offload_problems(layout: Layout) -> Iterator[tuple[set[str], str]]:
    if layout.offload not in OFFLOADS:
        near = did_you_mean(layout.offload, OFFLOADS)
        yield {"offload"}, f"offload={layout.offload} is unknown{near} (valid: {', '.join(OFFLOADS)})"
        return
    away = OFFLOADS[layout.offload]
    if away.working != "device" and (layout.zero or layout.pp > 1):
        other = f"zero={layout.zero}" if layout.zero else f"pp={layout.pp}"
        why = (
            "gathers weights from rows in memory"
            if layout.zero
            else "has several microbatches in every block"
        )
        yield (
            {"offload", "zero", "pp"},
            f"offload={layout.offload} does not combine with {other}, which {why}. Nearest valid: offload=states:disk",
        )
    if away.gradients != "device" and layout.compress != NONE:
        yield (
            {"offload", "compress"},
            f"offload={layout.offload} does not combine with compress={layout.compress}, whose residuals belong to "
            "buckets in memory. Nearest valid: offload=states:disk",
        )


def _zeropp_problems(layout: Layout) -> Iterator[tuple[set[str], str]]:
    if layout.zeropp == NONE:
        return
    try:
        zeropp(layout.zeropp)
    except UserError as error:
        yield {"zeropp"}, str(error)
        return
    if layout.zero != 3:
        yield (
            {"zeropp", "zero"},
            f"zeropp={layout.zeropp} changes what zero=3 sends: it needs zero=3, not zero={layout.zero}",
        )
    if layout.ep > 1:
        yield (
            {"zeropp", "ep"},
            f"zeropp={layout.zeropp} does not combine with ep={layout.ep}: experts are shared by groups of their own",
        )
    if message := node_problem(layout):
        yield {"zeropp", "ranks_per_node", "dp_shard", "cp", "tp"}, message


def anything(layout: Layout) -> bool:
    """Allows every layout; the default of `validate`."""
    return True


def validate(layout: Layout, ranks: int, allowed: Callable[[Layout], bool] = anything) -> None:
    """Checks that a layout is valid and fills exactly `ranks` ranks. allowed: True for the layouts that suit the model
    and its batch; only these are proposed.

    Raises:
        UserError: with the equation that does not hold and the nearest layouts that do.
    """
    found = [message for _, message in problems(layout)]
    if layout.ranks != ranks:
        product = equation(layout).removesuffix("s").removesuffix(" rank")
        found.insert(0, f"{product}, but there are {ranks} rank{'s' * (ranks != 1)}")
    if found:
        raise UserError(f"layout '{to_text(layout)}': {'; '.join(found)}{_proposal(layout, ranks, allowed)}")


def _proposal(layout: Layout, ranks: int, allowed: Callable[[Layout], bool]) -> str:
    """The nearest valid layouts with `ranks` ranks; if there are none, the nearest with fewer."""
    powers = (2**k for k in range(ranks.bit_length() - 1, -1, -1))
    for fewer in (*range(ranks, max(0, ranks - 9), -1), *powers):
        if near := nearest(layout, fewer, 3 if fewer == ranks else 1, allowed):
            text = " or ".join(to_text(candidate) for candidate in near)
            other = (
                ""
                if fewer == ranks
                else f" ({fewer} rank{'s' * (fewer != 1)}; the model has no layout for {ranks})"
            )
            return f". Nearest valid: {text}{other}"
    return ""


def nearest(
    layout: Layout, ranks: int, count: int = 3, allowed: Callable[[Layout], bool] = anything
) -> list[Layout]:
    """The valid layouts with `ranks` ranks that are most like `layout`: the axes change by the fewest doublings, and
    unused axes stay unused if possible. ZeRO is set to 1 where states must be shared, and to 0 where no ranks can share
    them; gradients are summed as by default where their algorithm is not for so many ranks, and without ZeRO++ where
    that does not fit."""

    def distance(candidate: Layout) -> float:
        pairs = [(getattr(layout, axis), getattr(candidate, axis)) for axis in AXES]
        doublings = sum(abs(math.log2(new / old)) + (old == 1 < new) for old, new in pairs)
        others = sum(
            getattr(candidate, name) != getattr(layout, name) for name in ("zero", "all_reduce", "zeropp")
        )
        return doublings + 0.5 * others

    stages = {0, layout.zero, layout.zero or (1 if layout.dp_shard > 1 else 0)}
    candidates = [
        replace(layout, zero=zero, all_reduce=all_reduce, zeropp=plus, **dict(zip(AXES, sizes, strict=True)))
        for all_reduce in dict.fromkeys((layout.all_reduce, AUTO))
        for plus in dict.fromkeys((layout.zeropp, NONE))
        for sizes in _sizes(layout, ranks)
        for zero in sorted(stages)
    ]
    candidates.sort(key=distance)
    return list(islice((c for c in candidates if not any(problems(c)) and allowed(c)), count))


def _sizes(layout: Layout, ranks: int) -> Iterator[tuple[int, ...]]:
    """Sizes of all axes whose product is `ranks`. If there are too many of them (720720 ranks have 656250), those with
    at most two other sizes than the layout, or than one rank."""
    if len(divisors(ranks)) <= MANY_DIVISORS:
        yield from _factor(ranks, len(AXES))
        return
    found = set()
    for base in (tuple(layout.sizes.values()), (1,) * len(AXES)):
        for first, second in combinations(range(len(AXES)), 2):
            kept = math.prod(size for axis, size in enumerate(base) if axis not in (first, second))
            if ranks % kept == 0:
                for one, other in _factor(ranks // kept, 2):
                    sizes = list(base)
                    sizes[first], sizes[second] = one, other
                    found.add(tuple(sizes))
    yield from sorted(found)


def _factor(product: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `product` as `count` ordered factors."""
    if count == 1:
        yield (product,)
        return
    for first in divisors(product):
        for rest in _factor(product // first, count - 1):
            yield (first, *rest)


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`."""
    return max(divisor for divisor in divisors(number) if divisor <= most)
