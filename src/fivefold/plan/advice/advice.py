"""Advice for a search that finds nothing: what is missing, and the nearest choice that works."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import replace

from fivefold.host.devices import GIB
from fivefold.plan.memory import model_states
from fivefold.plan.predict import Plan, held, limit
from fivefold.plan.search.bound import Bounds
from fivefold.plan.search.space import Space
from fivefold.recipe import count_parameters
from fivefold.spread.layout import Layout
from fivefold.spread.layout_text import to_text

TRIED = 24  # numbers of devices between a bound and the first doubling that does
SMALLEST = 20  # layouts whose bytes are counted exactly, of those that seem smallest
MOST_DEVICES = 2**17


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
