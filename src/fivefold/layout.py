"""Layout: how many ranks each axis of parallelism has, and which rank sits where. No torch.

The axes, outermost first: `pp, dp_replicate, dp_shard, cp, tp`. Neighbouring ranks differ in `tp`, the axis
that talks most, so it stays within a machine; `pp`, which talks least, spans machines. `ep` is no axis of its
own: for expert weights it divides the data and context axes again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from typing import TYPE_CHECKING

from fivefold.errors import UserError, did_you_mean
from fivefold.schedules.pipeline import SCHEDULES, stages_a_rank

if TYPE_CHECKING:
    from fivefold.recipe.schema import LayoutSection

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
GROUPS = {
    "pp": ("pp",),
    "tp": ("tp",),
    "cp": ("cp",),
    "replicate": ("dp_replicate",),
    "dp": ("dp_replicate", "dp_shard"),  # ranks with different sequences
    "shard": ("dp_shard", "cp"),  # ranks that share states: FSDP's
    "batch": (
        "dp_replicate",
        "dp_shard",
        "cp",
    ),  # ranks with different tokens: gradients are summed over them
    "all": AXES,
}
"""Ranks that communicate with one another: the axes along which they differ. Besides these there are three for
expert weights, which divide "batch" again (see `expert_coordinates`): "ep", "edp" and "eshard"."""


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
    schedule: str = "1f1b"
    virtual_stages: int = 1
    microbatches: int | None = None
    recompute: str = "none"

    @classmethod
    def from_recipe(cls, section: LayoutSection) -> Layout:
        return cls(**section.model_dump())

    @property
    def ranks(self) -> int:
        """Number of ranks: the product of the axes."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Number of ranks that compute different sequences: `dp_replicate x dp_shard`."""
        return self.dp_replicate * self.dp_shard

    @property
    def divided(self) -> bool:
        """Whether no rank holds and computes the whole model by itself."""
        return self.ranks > self.dp_replicate or self.ep > 1

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each axis, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank sits: its index on each axis. Inverse of `rank`."""
        assert 0 <= rank < self.ranks, f"rank {rank} of {self.ranks}"
        place = {}
        for axis, size in reversed(self.sizes.items()):
            rank, place[axis] = divmod(rank, size)
        return {axis: place[axis] for axis in AXES}

    def rank(self, coordinates: dict[str, int]) -> int:
        """The rank at these indices; an axis that is not named counts as 0. Inverse of `coordinates`."""
        rank = 0
        for axis, size in self.sizes.items():
            index = coordinates.get(axis, 0)
            assert 0 <= index < size, f"{axis} index {index} of {size}"
            rank = rank * size + index
        return rank


def stages_of_a_rank(layout: Layout) -> int:
    """Number of pipeline stages that each rank has: `virtual_stages`, or as many as the schedule wants; 1 without a
    pipeline."""
    return stages_a_rank(layout.schedule, layout.virtual_stages) if layout.pp > 1 else 1


def index_in(layout: Layout, group: str, rank: int) -> int:
    """A rank's index within its group."""
    if group in EXPERT_GROUPS:
        return expert_coordinates(layout, rank)[group]
    place, index = layout.coordinates(rank), 0
    for axis in GROUPS[group]:
        index = index * layout.sizes[axis] + place[axis]
    return index


EXPERT_GROUPS = ("ep", "edp", "eshard")


def expert_coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """How expert weights divide the ranks of one "batch" group: neighbours hold different experts ("ep"); ranks
    with the same experts and different tokens sum their gradients ("edp"), of which those in one "shard" group share
    the states ("eshard")."""
    batch, shard = index_in(layout, "batch", rank), index_in(layout, "shard", rank)
    return {"ep": batch % layout.ep, "edp": batch // layout.ep, "eshard": shard // layout.ep}


def members(layout: Layout, group: str) -> list[list[int]]:
    """All groups of this kind: lists of ranks in the order of their index."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.ranks):
        place = layout.coordinates(rank)
        if group in EXPERT_GROUPS:
            batch = index_in(layout, "batch", rank)
            own = {
                "ep": (batch // layout.ep,),
                "edp": (batch % layout.ep,),
                "eshard": (place["dp_replicate"], batch % layout.ep),
            }[group]
            key = (place["pp"], place["tp"], *own)
        else:
            key = tuple(place[axis] for axis in AXES if axis not in GROUPS[group])
        found.setdefault(key, []).append(rank)
    return list(found.values())


def parse(text: str) -> dict[str, int | bool | str]:
    """Reads a layout written as `dp=2,tp=2,zero=1` into fields of `[layout]`; returns only what is named.

    `dp=N` means N replicas (`dp_replicate`) with `zero=0`, and N ranks that share states (`dp_shard`) with
    `zero>=1`.

    Raises:
        UserError: listing every part that is not understood.
    """
    defaults = asdict(Layout())
    found: dict[str, int | bool | str] = {}
    problems = []
    for part in filter(None, (p.strip() for p in text.split(","))):
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
        raise UserError(f"layout '{text}': {'; '.join(problems)} (keys: {keys})")
    return found


def _value(text: str, default: int | bool | str | None) -> int | bool | str:
    """Reads one value in the type of its default (None stands for an optional integer)."""
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise ValueError("must be true or false")
        return text.lower() == "true"
    if isinstance(default, str):
        return text
    if not text.isascii() or not text.isdigit():
        raise ValueError("must be a whole number")
    return int(text)


def to_text(layout: Layout) -> str:
    """The layout as `parse` reads it, without what has its default: `dp=4,tp=2,zero=3`. One rank: `dp=1`."""
    parts = {f.name: getattr(layout, f.name) for f in fields(layout) if getattr(layout, f.name) != f.default}
    name = "dp_shard" if layout.zero else "dp_replicate"
    if name in parts and not ("dp_replicate" in parts and "dp_shard" in parts):
        parts = {"dp" if key == name else key: value for key, value in parts.items()}
    text = ",".join(f"{key}={str(value).lower()}" for key, value in parts.items())
    return text or "dp=1"


def describe(layout: Layout) -> str:
    """One line for people: `8 ranks: dp_shard 4 x tp 2, ZeRO 3, recompute full`."""
    axes = " x ".join(f"{axis} {size}" for axis, size in layout.sizes.items() if size > 1)
    words = [f"{layout.ranks} rank{'s' * (layout.ranks > 1)}" + (f": {axes}" if axes else "")]
    if layout.ep > 1:
        words.append(f"ep {layout.ep}")
    if layout.zero:
        words.append(f"ZeRO {layout.zero}")
    if layout.cp > 1:
        words.append(f"context by {layout.cp_method}")
    if layout.sp:
        words.append("sequence parallel")
    if layout.pp > 1:
        words.append(f"schedule {layout.schedule} with {stages_of_a_rank(layout)} stage(s) a rank")
    if layout.recompute != "none":
        words.append(f"recompute {layout.recompute}")
    return ", ".join(words)


def equation(layout: Layout) -> str:
    """`pp 1 x dp_replicate 1 x dp_shard 4 x cp 1 x tp 2 = 8 ranks`."""
    axes = " x ".join(f"{axis} {size}" for axis, size in layout.sizes.items())
    return f"{axes} = {layout.ranks} rank{'s' * (layout.ranks > 1)}"


def problems(layout: Layout) -> Iterator[tuple[set[str], str]]:
    """What is wrong with a layout whatever the model: (fields, message) pairs."""
    if layout.dp_shard > 1 and layout.zero == 0:
        yield (
            {"dp_shard", "zero"},
            f"dp_shard={layout.dp_shard} shares states between ranks: it needs zero=1, 2 or 3",
        )
    if layout.zero and layout.ranks > 1 and layout.dp_shard * layout.cp == 1:
        yield (
            {"zero", "dp_shard", "cp"},
            f"zero={layout.zero} shares states between ranks: it needs dp_shard > 1 (or cp > 1)",
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
    if layout.virtual_stages > 1 and layout.pp == 1:
        yield {"virtual_stages", "pp"}, f"virtual_stages={layout.virtual_stages} needs pp > 1"
    try:
        if layout.pp > 1 or layout.schedule not in SCHEDULES:
            stages_a_rank(layout.schedule, layout.virtual_stages)
    except UserError as error:
        yield {"schedule", "virtual_stages"}, str(error).removeprefix("layout.")


def anything(layout: Layout) -> bool:
    """No rule besides those of every layout."""
    return True


def validate(layout: Layout, ranks: int, allowed: Callable[[Layout], bool] = anything) -> None:
    """Checks that a layout makes sense and fills exactly `ranks` ranks. allowed: what a model and its batch say to a
    layout, so that only such ones are proposed.

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
    """The nearest layouts of so many ranks; where the model has none, of a smaller number that it has some for."""
    powers = (2**k for k in range(ranks.bit_length() - 1, -1, -1))
    for fewer in (*range(ranks, max(0, ranks - 9), -1), *powers):
        if near := nearest(layout, fewer, 3 if fewer == ranks else 1, allowed):
            text = " or ".join(to_text(candidate) for candidate in near)
            other = (
                ""
                if fewer == ranks
                else f" ({fewer} rank{'s' * (fewer != 1)}; the model has none for {ranks})"
            )
            return f". Nearest valid: {text}{other}"
    return ""


def nearest(
    layout: Layout, ranks: int, count: int = 3, allowed: Callable[[Layout], bool] = anything
) -> list[Layout]:
    """The valid layouts of `ranks` ranks that are most like `layout`: axes change by the fewest doublings,
    and an axis that was not used is taken into use last. States are shared (zero=1) where that is missing, or not where
    there is nobody to share them with."""

    def distance(candidate: Layout) -> float:
        pairs = [(getattr(layout, axis), getattr(candidate, axis)) for axis in AXES]
        doublings = sum(abs(math.log2(new / old)) + (old == 1 < new) for old, new in pairs)
        return doublings + 0.5 * (candidate.zero != layout.zero)

    stages = {0, layout.zero, layout.zero or (1 if layout.dp_shard > 1 else 0)}
    candidates = [
        replace(layout, zero=zero, **dict(zip(AXES, sizes, strict=True)))
        for sizes in _factor(ranks, len(AXES))
        for zero in sorted(stages)
    ]
    candidates.sort(key=distance)
    return list(islice((c for c in candidates if not any(problems(c)) and allowed(c)), count))


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
