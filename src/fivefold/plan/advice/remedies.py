"""Changes of a recipe that need less memory, with the peak that the planner predicts for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from fivefold.errors import UserError
from fivefold.plan.cluster.devices import Cluster
from fivefold.plan.predict import Plan, predict
from fivefold.plan.software import Software
from fivefold.recipe import Recipe, change
from fivefold.sharding.layout import Layout
from fivefold.sharding.shares import divisors
from fivefold.sharding.tiers import NOT_OFFLOADED, OFFLOADS

LESS = 0.98
"""A change counts if it needs less than this share of the memory."""


@dataclass(frozen=True)
class Remedy:
    """One change. sets: the options that make it. peak: predicted bytes of tensors on the rank with most. slower: the
    predicted step beside the recipe's own, 1 if it is as fast."""

    sets: tuple[str, ...]
    peak: int
    slower: float

    @property
    def options(self) -> str:
        return " ".join(f"--set {one}" for one in self.sets)


def remedies(
    recipe: Recipe, cluster: Cluster, software: Software, room: float, gpu: bool, count: int = 3
) -> tuple[Plan, list[Remedy]]:
    """(the plan of a resolved recipe, the `count` changes that are nearest to it). Those come first that fit into
    `room` bytes, fastest first; then those that need least. One of each kind, and all together if none fits alone.

    gpu: the memory that ran out is a GPU's.

    Raises:
        UserError: the planner cannot predict the recipe.
    """
    cluster = replace(cluster, devices=None)
    own = predict(recipe, cluster, software)

    def of(sets: Sequence[str]) -> Remedy | None:
        with suppress(UserError):
            plan = predict(change(recipe, list(sets)), cluster, software)
            if plan.peak_bytes < LESS * own.peak_bytes:
                return Remedy(tuple(sets), plan.peak_bytes, plan.step.seconds / own.step.seconds)
        return None

    def rank(one: Remedy) -> tuple[bool, float]:
        return (one.peak > room, one.slower if one.peak <= room else one.peak)

    kinds = [sorted(filter(None, map(of, kind)), key=rank) for kind in _kinds(recipe, room, gpu)]
    best = [found[0] for found in kinds if found]
    if all(one.peak > room for one in best) and (all_of_them := of([one for r in best for one in r.sets])):
        best.append(all_of_them)
    best.sort(key=rank)
    others = sorted((one for found in kinds for one in found[1:]), key=rank)
    return own, [*best, *others][:count]


def _kinds(recipe: Recipe, room: float, gpu: bool) -> Iterator[list[list[str]]]:
    """Changes by kind: microbatches, recomputation, ZeRO, offload."""
    train, layout = recipe.train, Layout.from_recipe(recipe.layout)
    B = train.microbatch_size or 1
    yield [[f"train.microbatch_size={size}"] for size in divisors(B) if size < B]
    modes = ["full", "ops:attention+gate+norm"]
    if room > 0 and not recipe.servers.count:
        modes.append(f"budget:{int(room / 2**20)}MiB")
    yield [[f"layout.recompute={mode}"] for mode in modes if mode != layout.recompute]
    if layout.dp > 1 and not recipe.servers.count:
        all_of_them = ["layout.dp_replicate=1", f"layout.dp_shard={layout.dp}"]
        yield [[*all_of_them, f"layout.zero={zero}"] for zero in range(1, 4) if zero > layout.zero]
    if layout.offload == NOT_OFFLOADED:
        # On CPUs host memory is the memory that ran out.
        yield [
            [f"layout.offload={how}"]
            for how, away in OFFLOADS.items()
            if away.disk or (how != NOT_OFFLOADED and (gpu or away.stays))
        ]
