"""Changes that help, each with its predicted effect.

Of a recipe: those that need less memory. Of a search: why the other plans are slower than the best, and which
bottlenecks the best one has; each answer comes from pricing a plan again with one thing changed. Where nothing is
found, what is missing, and the nearest choice that works.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from fivefold.errors import UserError
from fivefold.host.devices import GIB
from fivefold.plan.cluster.devices import Cluster, Device, Link
from fivefold.plan.memory import model_states
from fivefold.plan.predict import Plan, held, limit, predict, price
from fivefold.plan.search.bound import Bounds
from fivefold.plan.search.space import Space
from fivefold.plan.setting import Setting, Software
from fivefold.plan.time import stage_costs
from fivefold.recipe import Recipe, change, count_parameters
from fivefold.sharding.layout import Layout, divisors, to_text
from fivefold.sharding.parts import stages_of
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


TRIED = 24  # numbers of devices between a bound and the first doubling that does
SMALLEST = 20  # layouts whose bytes are counted exactly, of those that seem smallest
MOST_DEVICES = 2**17
WORTH = 0.001  # a smaller share is not mentioned


def nothing_valid(space: Space) -> str:
    """The message for a batch that is too small for all layouts, with the nearest valid one and number of devices."""
    devices, batch = space.cluster.devices, space.batch
    ranks = [devices // way.tp // way.cp // pp for way in space.ways() for pp in space.stages(way)]
    return (
        f"no layout of {devices} devices has a sequence of train.global_batch_size = {batch} for each data-parallel "
        f"rank. Nearest valid: train.global_batch_size = {min(ranks)}, or {space.cluster.name}:{batch}"
    )


def nothing_fits(space: Space, bounds: Bounds, near: Plan) -> str:
    """The message for layouts that do not fit: memory of the smallest, and a number of devices that is enough."""
    most, s = limit(space.cluster), near.setting
    if most <= 0:
        return (
            f"no layout fits: a device of {space.cluster.name} has {space.cluster.device.memory / GIB:.2f} GiB, and "
            f"the runtime takes {space.cluster.device.reserve / GIB:.1f} GiB"
        )
    return (
        f"no layout fits: the smallest of {space.size}, {to_text(near.layout)} with microbatches of {s.sizes.B} in "
        f"{s.mode}, needs {near.peak_bytes / GIB:.1f} GiB of {most / GIB:.1f} GiB per device. "
        + _enough_devices(space, bounds)
    )


def _enough_devices(space: Space, bounds: Bounds) -> str:
    name, most = space.cluster.name, limit(space.cluster)
    states = min(
        sum(model_states.state_bytes(bounds.software.states[mode], 3, 1.0, 1.0)) for mode in space.precisions
    )
    least = math.ceil(states * count_parameters(space.recipe.model) / most)
    for devices in _numbers(max(least, space.cluster.devices + 1), space.cluster.per_node):
        cluster = replace(space.cluster, devices=devices)
        if smallest := _fitting(replace(space, cluster=cluster), bounds, most):
            return f"{name}:{devices} would be enough ({to_text(smallest)})"
    return f"No tried number of devices up to {MOST_DEVICES} is enough: the batch or the blocks are too large"


def _numbers(first: int, per_node: int) -> Iterator[int]:
    """Numbers of devices to try: every number within a node, then whole nodes, then doublings."""
    devices = first
    for _ in range(TRIED):
        yield devices
        devices = devices + 1 if devices < per_node else (devices // per_node + 1) * per_node
    devices = 2 ** math.ceil(math.log2(devices))
    while devices <= MOST_DEVICES:
        yield devices
        devices *= 2


def _fitting(space: Space, bounds: Bounds, most: float) -> Layout | None:
    """A layout that fits with full recomputation and one sequence at a time, or None."""
    choices = [
        space.choice(replace(layout, recompute="full"), 1, mode)
        for shape in space.shapes
        for layout in space.sharings(shape)
        for mode in space.precisions
    ]
    for c in heapq.nsmallest(SMALLEST, choices, key=bounds.bytes.of):
        if max(m.total for m in held(bounds.setting(c))) <= most:
            return c.layout
    return None


def reasons(plans: Sequence[Plan]) -> list[str]:
    """For each plan, the largest reason why it is slower than the best, as a share of the best's step ('' for it)."""
    if not plans:
        return []
    best = _parts(plans[0])
    return ["", *(_reason(plan, plans[0], best) for plan in plans[1:])]


def _reason(plan: Plan, best: Plan, its: dict[str, float]) -> str:
    more = {name: seconds - its[name] for name, seconds in _parts(plan).items()}
    name = max(more, key=lambda key: more[key])
    if more[name] / best.step.seconds < WORTH:
        return f"as fast, {(plan.peak_bytes - best.peak_bytes) / GIB:+.1f} GiB"
    return f"{name} +{100 * more[name] / best.step.seconds:.1f}%"


def _parts(plan: Plan) -> dict[str, float]:
    """Seconds of the step by cause. They add up to the step."""
    s, step = plan.setting, plan.step
    worst, even = _computing(s)
    once, _ = _computing(replace(s, layout=replace(s.layout, recompute="none")))
    again, uneven = worst - once, worst - even
    return {
        "bubble": step.bubble,
        "communication within the model": step.exposed["model"],
        "gradient sums": step.exposed["data"],
        "recomputation": again,
        "uneven stages": uneven,
        "matmuls, memory and optimizer": step.compute - again - uneven,
    }


def _computing(s: Setting) -> tuple[float, float]:
    """Seconds per step that the busiest pipeline rank computes, and the average over all."""
    costs = stage_costs.stage_costs(s)
    sums = [
        s.microbatches
        * sum(costs[stage].seconds - costs[stage].sent for stage in stages_of(s.layout, position))
        for position in range(s.layout.pp)
    ]
    return max(sums), sum(sums) / len(sums)


def limits(plans: Sequence[Plan], roomier: Plan | None, indivisible: Plan | None) -> list[str]:
    """The bottlenecks of the best plan, worst first, with the gain in tokens/s from more of each.

    roomier: a fast plan for unlimited memory. indivisible: a plan whose tensor ranks need not divide the model. For
    links, devices and batch the given plans are priced again, so another layout may gain more.
    """
    best, more = plans[0], list[tuple[Plan, str]]()
    if roomier is not None:
        room = f"{roomier.peak_bytes / GIB:.1f} of {best.limit / GIB:.1f} GiB"
        more.append((roomier, f"memory: {_how(roomier)} would be {{}} faster, but takes {room}"))
    if indivisible is not None:
        why = f"but tp={indivisible.layout.tp} does not divide the model"
        more.append((indivisible, f"divisibility: {_how(indivisible)} would be {{}} faster, {why}"))
    doubled = price(replace(best.setting, microbatches=2 * best.setting.microbatches))
    more.append((doubled, "batch size: twice train.global_batch_size would give {} more tokens/s"))
    for what, cluster in _doubled(best.setting.cluster).items():
        again = [price(replace(plan.setting, cluster=cluster)) for plan in plans]
        faster = min(again, key=lambda plan: plan.step.seconds)
        more.append((faster, f"{what} would give {{}} more tokens/s"))
    gains = [(plan.tokens_per_s / best.tokens_per_s - 1, text) for plan, text in more]
    gains.sort(key=lambda pair: -pair[0])
    return [text.format(f"{100 * gain:.1f}%") for gain, text in gains if gain >= WORTH]


def _how(plan: Plan) -> str:
    s = plan.setting
    return f"{to_text(plan.layout)} with microbatches of {s.sizes.B}"


def _doubled(cluster: Cluster) -> dict[str, Cluster]:
    """The cluster with one part twice as fast."""
    device: Device = cluster.device
    computes = replace(device, peak={dtype: 2 * rate for dtype, rate in device.peak.items()})
    moves = replace(device, bandwidth=2 * device.bandwidth)
    return {
        "links within a node: twice the speed": replace(cluster, intra=_twice(cluster.intra)),
        "network between nodes: twice the speed": replace(cluster, inter=_twice(cluster.inter)),
        "compute: devices with twice the FLOP/s": replace(cluster, device=computes),
        "memory bandwidth: twice as much": replace(cluster, device=moves),
    }


def _twice(link: Link) -> Link:
    reduce = 2 * link.reduce if link.reduce else None
    return replace(link, bandwidth=2 * link.bandwidth, latency=link.latency / 2, reduce=reduce)
