"""What the pictures of a plan show, as numbers: where the step's time goes, the roofline of its operations, the
timeline of its pipeline. Drawn by `observe`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fivefold.plan import memory, operations, rates, time
from fivefold.plan.cost import Cost, Setting, operation, repeated
from fivefold.plan.operations import Matmul, Operation
from fivefold.plan.predict import Plan
from fivefold.schedules.pipeline import Costs, Timeline, simulate
from fivefold.sharding import stages_of


@dataclass(frozen=True)
class Point:
    """An operation's work in a step on the busiest rank, what is computed again included. flops: 0 where only the bytes
    that it moves are counted (element-wise work). seconds: on a device of average speed, without messages."""

    name: str
    flops: float
    moved: float
    seconds: float

    @property
    def intensity(self) -> float:
        """FLOPs a byte moved."""
        return self.flops / self.moved

    @property
    def rate(self) -> float:
        """FLOP/s reached while it runs."""
        return self.flops / self.seconds


@dataclass(frozen=True)
class Roofline:
    """peak: FLOP/s of the data sheet in the compute dtype; bandwidth: bytes/s of memory, of the data sheet."""

    peak: float
    bandwidth: float
    points: list[Point]

    @property
    def ridge(self) -> float:
        """FLOPs a byte from which on the products, not the bytes, set the pace."""
        return self.peak / self.bandwidth

    def bound(self, point: Point) -> str:
        """What sets its pace: "compute" or "memory"."""
        return "compute" if point.intensity >= self.ridge else "memory"


@dataclass(frozen=True)
class Pictures:
    """costs: of each stage for one microbatch; shares, timeline: see the functions."""

    plan: Plan
    costs: list[Cost]
    roofline: Roofline
    shares: dict[str, float]
    timeline: Timeline | None


def pictures(plan: Plan) -> Pictures:
    """All that is drawn of a plan."""
    costs = time.stage_costs(plan.setting)
    found = roofline(plan, costs)
    return Pictures(plan, costs, found, shares(plan, found), timeline(plan, costs))


def roofline(plan: Plan, costs: Sequence[Cost]) -> Roofline:
    """The operations of a step on the busiest rank, in forward's order; the same operation of all blocks is one."""
    s = plan.setting
    device, mine = s.cluster.device, stages_of(s.layout, busiest(plan, costs))
    points = [
        _point(op, s, recompute, count * s.microbatches)
        for ops, recompute, count in _parts(plan, mine)
        for op in ops
        if count
    ]
    return Roofline(device.peak[s.dtype], device.bandwidth, _together([*points, *_sums(plan, mine)]))


def shares(plan: Plan, found: Roofline) -> dict[str, float]:
    """Seconds of the step by what the busiest rank does in them; together they are the step.

    "other computing": what the points leave of it (the slowest device, limits of the host, what comes once a step).
    """
    step, sent, bound = plan.step, plan.step.exposed, {"compute": 0.0, "memory": 0.0}
    for point in found.points:
        bound[found.bound(point)] += point.seconds
    update = dict(step.terms)["optimizer"]
    return {
        "compute-bound operations": bound["compute"],
        "memory-bound operations": bound["memory"],
        "optimizer (memory-bound)": update,
        "other computing": step.compute - bound["compute"] - bound["memory"] - update,
        "messages within the model": sent["model"],
        "gradients and weights sent": sent["data"],
        "waiting for other stages": step.bubble,
    }


def timeline(plan: Plan, costs: Sequence[Cost]) -> Timeline | None:
    """The pipeline of a step with each stage's planned times, of the first `drawn` microbatches; None without one."""
    s = plan.setting
    if s.layout.pp == 1:
        return None
    price = Costs(
        [c.forward for c in costs],
        [c.input for c in costs],
        [c.weight for c in costs],
        transfer=time.transfers(s),
    )
    layout = s.layout
    return simulate(memory.schedule(layout.schedule, layout.pp, drawn(s), layout.virtual_stages), price)


def drawn(s: Setting) -> int:
    """Microbatches in the picture of a pipeline: twice as many as ranks show how it fills and drains; each further one
    only repeats the middle."""
    p = s.layout.pp
    return min(s.microbatches, 2 * p + s.microbatches % p)


def busiest(plan: Plan, costs: Sequence[Cost]) -> int:
    """The position in the pipeline whose rank computes longest."""
    layout = plan.layout
    return max(range(layout.pp), key=lambda rank: sum(costs[i].seconds for i in stages_of(layout, rank)))


def _parts(plan: Plan, mine: Sequence[int]) -> Iterator[tuple[list[Operation], str, int]]:
    """(operations, what backward computes again, how often a microbatch meets them) of a rank with these
    stages."""
    s = plan.setting
    by_stage = memory.stages(s.model, s.layout, s.software.partition)
    mixed = [operations.is_mixed(s.model, number) for stage in mine for number in by_stage[stage]]
    yield operations.begin(s.sizes, s.software), "none", int(0 in mine)
    for kind in (False, True):
        if count := mixed.count(kind):
            yield operations.block(s.sizes, s.software, kind), s.layout.recompute, count
    yield operations.end(s.sizes, s.software), "none", int(len(by_stage) - 1 in mine)


def _point(op: Operation, s: Setting, recompute: str, count: int) -> Point:
    """An operation that is met `count` times."""
    cost, forward = operation(op, s), 1 + repeated(op, recompute, s)
    flops, moved = _work(op, s)
    seconds = _alone(cost, forward)
    back = (2.5 if op.attention else 2.0) * flops
    both = moved[0] * forward + moved[1]
    return Point(op.name, count * (flops * forward + back), count * both, count * seconds)


def _sums(plan: Plan, mine: Sequence[int]) -> Iterator[Point]:
    """Each microbatch's gradients are added to those before."""
    s = plan.setting
    by_stage = memory.stages(s.model, s.layout, s.software.partition)
    blocks, _, end, tied = memory.elements(s.model, s.layout)
    own = sum(blocks[number].computes for stage in mine for number in by_stage[stage])
    if len(by_stage) - 1 in mine:
        own += end.computes + tied.computes
    if seconds := s.microbatches * time.accumulate(own, s).weight:
        yield Point("gradient sums", 0.0, seconds / rates.stream(1.0, s.cluster.device, "", s.dtype), seconds)


def _alone(cost: Cost, forward: float) -> float:
    """Seconds without messages; forward is done so often."""
    return (cost.forward - cost.sent_forward) * forward + cost.input - cost.sent_backward + cost.weight


def _work(op: Operation, s: Setting) -> tuple[float, tuple[float, float]]:
    """FLOPs of forward; bytes to and from memory in forward and backward. A product reads both factors and writes the
    result once, and so twice in backward; fused attention reads queries, keys and values and writes the output."""
    flops, forward, backward = 0.0, op.forward, op.backward
    if op.matmul:
        flops += _flops(op.matmul)
        size = _bytes(op.matmul) * s.sizes.e
        forward, backward = forward + size, backward + 2 * size
    if op.attention:
        flops += op.attention
        queries, context = (
            s.model.dim / s.sizes.tp,
            s.sizes.cp,
        )  # keys and values of all context ranks are read
        size = s.sizes.N * (2 * queries + (s.sizes.qkv - queries) * context) * s.sizes.e
        forward, backward = forward + size, backward + 2 * size
    return flops, (forward, backward)


def _flops(p: Matmul) -> float:
    return 2.0 * p.m * p.n * p.k * p.count


def _bytes(p: Matmul) -> float:
    """Elements of both factors and the result."""
    return p.count * (p.m * p.k + p.k * p.n + p.m * p.n)


def _together(points: Sequence[Point]) -> list[Point]:
    """Operations of one name as one."""
    found: dict[str, Point] = {}
    for p in points:
        old = found.get(p.name, Point(p.name, 0.0, 0.0, 0.0))
        found[p.name] = Point(p.name, old.flops + p.flops, old.moved + p.moved, old.seconds + p.seconds)
    return list(found.values())
