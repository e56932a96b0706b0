"""The numbers in the pictures of a plan: parts of the step's time, roofline, timeline. `observe` draws them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fivefold.models.operations import Operation
from fivefold.models.recomputation import region
from fivefold.plan.memory import model_states, operations
from fivefold.plan.predict import Plan
from fivefold.plan.setting import Setting
from fivefold.plan.time import pipeline, rates, stage_costs, sync_costs
from fivefold.plan.time.cost import operation
from fivefold.schedules.pipeline import Timeline, shown, simulate
from fivefold.sharding.parts import stages_of


@dataclass(frozen=True)
class Point:
    """An operation's work per step on the busiest rank, with recomputation.

    flops: 0 for element-wise work, which counts bytes only. seconds: on a device of average speed, without messages."""

    name: str
    flops: float
    moved: float
    seconds: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved."""
        return self.flops / self.moved

    @property
    def rate(self) -> float:
        """FLOP/s that it reaches."""
        return self.flops / self.seconds


@dataclass(frozen=True)
class Roofline:
    """Operations under the device's roof. peak: data sheet FLOP/s in the compute dtype. bandwidth: memory bytes/s."""

    peak: float
    bandwidth: float
    points: list[Point]

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which an operation is compute-bound."""
        return self.peak / self.bandwidth

    @property
    def ends(self) -> tuple[float, float, float]:
        """Of what pictures show: the lowest and the highest FLOPs per byte, and the lowest FLOP/s."""
        products = [point for point in self.points if point.flops]
        low = min(self.ridge / 10, *(point.intensity for point in products)) / 1.5
        high = max(self.ridge * 10, *(point.intensity for point in products)) * 1.5
        return low, high, min(low * self.bandwidth, *(point.rate for point in products)) / 1.5

    def bound(self, point: Point) -> str:
        """The bound of an operation: "compute" or "memory"."""
        return "compute" if point.intensity >= self.ridge else "memory"


@dataclass(frozen=True)
class Pictures:
    """shares, timeline: see the functions."""

    plan: Plan
    roofline: Roofline
    shares: dict[str, float]
    timeline: Timeline | None


def pictures(plan: Plan) -> Pictures:
    """Everything that is drawn of a plan."""
    found = roofline(plan)
    return Pictures(plan, found, shares(plan, found), timeline(plan))


def roofline(plan: Plan) -> Roofline:
    """The operations of a step on the busiest rank, in the order of forward, merged by name over all blocks."""
    s = plan.setting
    device, position = s.cluster.device, busiest(plan)
    points = [
        _point(op, s, recompute, count * s.microbatches)
        for ops, recompute, count in _parts(s, position)
        for op in ops
        if count
    ]
    found = [point for point in _together([*points, *_sums(s, position)]) if point.moved]  # others only send
    return Roofline(device.peak[s.rate], device.bandwidth, found)


def shares(plan: Plan, found: Roofline) -> dict[str, float]:
    """Seconds of the step by activity of the busiest rank. They add up to the step.

    "other computation": time outside the points (the slowest device, host limits, work once per step).
    """
    step, sent, bound = plan.step, plan.step.exposed, {"compute": 0.0, "memory": 0.0}
    for point in found.points:
        bound[found.bound(point)] += point.seconds
    update = dict(step.terms)["optimizer"]
    return {
        "compute-bound operations": bound["compute"],
        "memory-bound operations": bound["memory"],
        "optimizer (memory-bound)": update,
        "other computation": step.compute - bound["compute"] - bound["memory"] - update,
        "communication in the model": sent["model"],
        "gradient and weight traffic": sent["data"] + sent.get("sites", 0.0),
        "waiting for other stages": step.bubble,
    }


def timeline(plan: Plan) -> Timeline | None:
    """The pipeline of a step with each stage's planned times, for the first `shown` microbatches. None without one."""
    s = plan.setting
    if s.layout.pp == 1:
        return None
    price = pipeline.pipeline_costs([cost.timed for cost in plan.step.costs], pipeline.transfers(s))
    return simulate(s.schedule(shown(s.microbatches, s.layout.pp)), price)


def busiest(plan: Plan) -> int:
    """The pipeline rank that computes longest."""
    layout, costs = plan.layout, plan.step.costs
    return max(range(layout.pp), key=lambda rank: sum(costs[i].seconds for i in stages_of(layout, rank)))


def _parts(s: Setting, position: int) -> Iterator[tuple[list[Operation], str, int]]:
    """(operations, recomputation, repeats per microbatch) for a rank of a pipeline position."""
    first, last = s.ends(position)
    blocks = [(s.card.is_mixed(number), s.recompute[number]) for number in s.blocks(position)]
    yield s.work.begin, "none", int(first)
    for (kind, mode), count in Counter(sorted(blocks)).items():
        yield s.work.block[kind], mode, count
    yield s.work.end, "none", int(last)


def _point(op: Operation, s: Setting, recompute: str, count: int) -> Point:
    """The point of an operation that occurs `count` times."""
    again = 1 + region(recompute, s.software).repeated(op, stage_costs.saves_late(s.layout))
    forward, backward = operation(op, s).alone
    flops, (read, written) = operations.flops(op), _moved(op, s)
    flops *= again + (2.5 if op.attention else 2.0)
    return Point(
        op.name, count * flops, count * (read * again + written), count * (forward * again + backward)
    )


def _sums(s: Setting, position: int) -> Iterator[Point]:
    """The points of accumulating each microbatch's gradients."""
    blocks, _, end, tied = model_states.elements(s.model, s.layout)
    own = sum(blocks[number].computes for number in s.blocks(position))
    if s.ends(position)[1]:
        own += end.computes + tied.computes
    if seconds := s.microbatches * sync_costs.accumulate(own, s).weight:
        yield Point(
            "gradient sums", 0.0, seconds / rates.stream(1.0, s.cluster.device, "copy", s.dtype), seconds
        )


def _moved(op: Operation, s: Setting) -> tuple[float, float]:
    """Bytes of memory traffic in forward and in backward.

    A matmul reads both factors and writes the result once, and does so twice in backward. Fused attention reads
    queries, keys and values and writes the output."""
    size, m = 0.0, op.matmul
    if m:
        size += m.count * (m.m * m.k + m.k * m.n + m.m * m.n)
    if op.attention:
        queries, context = s.sizes.q, s.sizes.cp  # keys and values of all context ranks are read
        size += s.sizes.N * (2 * queries + (s.sizes.qkv - queries) * context)
    return op.forward + size * s.sizes.e, op.backward + 2 * size * s.sizes.e


def _together(points: Sequence[Point]) -> list[Point]:
    """Merges the points of operations with the same name."""
    found: dict[str, Point] = {}
    for p in points:
        old = found.get(p.name, Point(p.name, 0.0, 0.0, 0.0))
        found[p.name] = Point(p.name, old.flops + p.flops, old.moved + p.moved, old.seconds + p.seconds)
    return list(found.values())
