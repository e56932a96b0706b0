"""Seconds of a step: operations priced on the device, messages on the network, the pipeline by running its schedule in
the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from fivefold.layout import Layout
from fivefold.plan import communication, memory, operations, rates
from fivefold.plan.clusters import Cluster
from fivefold.plan.communication import group
from fivefold.plan.memory import Elements
from fivefold.plan.operations import Matmul, Message, Operation, Sizes
from fivefold.plan.software import Software
from fivefold.recipe.schema import ModelSection
from fivefold.schedules.pipeline import Costs, simulate


@dataclass(frozen=True)
class Cost:
    """Seconds of a part of the model for one microbatch: forward, gradient of the input, gradient of the weights; each
    with what of it is waiting for messages. host: seconds to issue forward, and as long again for backward."""

    forward: float = 0.0
    input: float = 0.0
    weight: float = 0.0
    sent_forward: float = 0.0
    sent_backward: float = 0.0
    host: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def times(self, count: float) -> Cost:
        return Cost(*(count * value for value in self.values()))

    def values(self) -> tuple[float, ...]:
        return (self.forward, self.input, self.weight, self.sent_forward, self.sent_backward, self.host)

    @property
    def bound(self) -> Cost:
        """The same where the processor issues work more slowly than the device does it."""
        scale = max(1.0, self.host / (self.input + self.weight)) if self.input + self.weight else 1.0
        forward = max(self.forward, self.host)
        return Cost(
            forward, self.input * scale, self.weight * scale, self.sent_forward, self.sent_backward, self.host
        )

    def slowed(self, factor: float) -> Cost:
        """The same on a slower device; messages take as long as before."""
        return Cost(
            (self.forward - self.sent_forward) * factor + self.sent_forward,
            (self.input - self.sent_backward) * factor + self.sent_backward,
            self.weight * factor,
            self.sent_forward,
            self.sent_backward,
            self.host,
        )

    @property
    def seconds(self) -> float:
        return self.forward + self.input + self.weight

    @property
    def sent(self) -> float:
        return self.sent_forward + self.sent_backward


@dataclass(frozen=True)
class Setting:
    """All that a price depends on."""

    model: ModelSection
    layout: Layout
    cluster: Cluster
    software: Software
    sizes: Sizes
    dtype: str
    microbatches: int


@dataclass
class Step:
    """Seconds of one optimizer step. compute: of the busiest rank, the optimizer included. exposed: messages that it
    waits for, by axis. bubble: the rest, in which it waits for other stages. terms: what each part came to."""

    seconds: float
    compute: float
    exposed: dict[str, float]
    bubble: float
    terms: list[tuple[str, float]] = field(default_factory=list)


def message(sent: Message, s: Setting) -> float:
    """Seconds of a collective, were nothing beside it."""
    if sent.what == "ring":  # from neighbour to neighbour, cp - 1 times
        hops = s.layout.cp - 1
        crosses = group(s.layout, s.cluster, "cp").nodes > 1
        return hops * communication.send(sent.size / hops, crosses, s.cluster)
    price = getattr(communication, sent.what)
    return price(sent.size, group(s.layout, s.cluster, sent.axis), s.cluster)


def operation(op: Operation, s: Setting) -> Cost:
    """Seconds of an operation."""
    device, e = s.cluster.device, s.sizes.e
    gap = op.kernels * s.software.kernel
    forward = rates.stream(op.forward, device) + rates.random(op.random, device) + gap
    inputs = rates.stream(op.backward, device) + gap
    weight = 0.0
    if op.matmul:
        p = op.matmul
        forward += rates.matmul(p, device, s.dtype, e)
        inputs += rates.matmul(Matmul(p.m, p.k, p.n, p.count, p.weight), device, s.dtype, e)
        other = rates.matmul(Matmul(p.k, p.n, p.m, p.count, p.weight), device, s.dtype, e) + gap
        if p.weight:
            weight += other
        else:
            inputs += other
    if op.attention:
        model = s.model
        length, head = model.seq_len, model.dim / model.heads
        forward += rates.attention(op.attention, length, head, device, s.dtype, False)
        inputs += rates.attention(op.attention, length, head, device, s.dtype, True)
    sent_forward = _exposed(op.sent_forward, forward, s)
    sent_backward = _exposed(op.sent_backward, inputs, s)
    return Cost(
        forward + sent_forward,
        inputs + sent_backward,
        weight,
        sent_forward,
        sent_backward,
        s.software.host_tensor * (len(op.sent_forward) + len(op.sent_backward)) / 2,
    )


def _exposed(messages: Iterable[Message], beside: float, s: Setting) -> float:
    """Seconds of messages that nothing hides."""
    hidden = sum(message(m, s) for m in messages if m.hidden)
    return sum(message(m, s) for m in messages if not m.hidden) + max(0.0, hidden - beside)


def part(ops: Sequence[Operation], s: Setting, recompute: str = "none") -> Cost:
    """Seconds of several operations, with what backward computes again."""
    costs = [operation(op, s) for op in ops]
    total = sum(costs, Cost())
    again = Cost()
    for op, cost in zip(ops, costs, strict=True):
        again += cost.times(repeated(op, recompute, s.software))
    return total + Cost(0, again.forward, 0, 0, again.sent_forward, again.host / 2)


def repeated(op: Operation, recompute: str, software: Software) -> float:
    """How often forward is repeated in backward, on average."""
    if recompute != "selective":
        return 1.0 if recompute == "full" else 0.0
    if software.selective == "operations":
        return 0.0 if op.attention else 0.5 if op.matmul else 1.0
    return 1.0 if op.part == "core" or (op.part == "inner" and software.selective == "sublayer") else 0.0


def block_cost(s: Setting, number: int) -> Cost:
    """Seconds of a block for one microbatch, data parallelism within the step included."""
    ops = operations.block(s.sizes, s.software, operations.is_mixed(s.model, number))
    cost = (part(ops, s, s.layout.recompute) + Cost(host=s.software.host)).bound
    elements = memory.elements(s.model, s.layout)[0][number].computes
    cost += accumulate(elements, s)
    return cost + within_step(elements, cost, s)


def stage_costs(s: Setting) -> list[Cost]:
    """Seconds of each pipeline stage for one microbatch."""
    by_stage, counted = (
        memory.stages(s.model, s.layout, s.software.partition),
        memory.elements(s.model, s.layout),
    )
    kinds: dict[bool, Cost] = {}
    costs = []
    for stage, numbers in enumerate(by_stage):
        total = Cost()
        for number in numbers:
            mixed = operations.is_mixed(s.model, number)
            if mixed not in kinds:
                kinds[mixed] = block_cost(s, number)
            total += kinds[mixed]
        if stage == 0:
            total += part(operations.begin(s.sizes, s.software), s)
        if stage == len(by_stage) - 1:
            total += part(operations.end(s.sizes, s.software), s)
            total += accumulate(counted[2].computes + counted[3].computes, s)
        costs.append(total)
    slower = rates.slowest(s.layout.ranks)
    costs = [cost.slowed(slower) for cost in costs]
    if not s.software.overlap_pipeline and s.layout.pp > 1:
        wait = max(seconds for (a, b), seconds in transfers(s).items() if b == a + 1)
        costs = [cost + Cost(wait, wait, 0, wait, wait) for cost in costs]
    return costs


def accumulate(elements: float, s: Setting) -> Cost:
    """A microbatch's gradient is added to the sum of those before."""
    if s.microbatches == 1 and s.dtype == "fp32":
        return Cost()
    size = elements * (s.sizes.e + 2 * s.software.states[s.dtype].gradient)
    return Cost(weight=rates.stream(size, s.cluster.device))


def within_step(elements: float, cost: Cost, s: Setting) -> Cost:
    """What ZeRO sends in every microbatch: stage 3 gathers a block's weights before forward and before backward, stages
    2 and 3 scatter its gradients; while the block beside it computes, if the software overlaps."""
    if s.layout.zero < 2 or s.layout.dp_shard * s.layout.cp == 1:
        return Cost()
    shards, b = group(s.layout, s.cluster, "shard"), s.software.states[s.dtype]
    gather = communication.all_gather(elements * b.working, shards, s.cluster) if s.layout.zero == 3 else 0.0
    scatter = communication.reduce_scatter(elements * b.reduce, shards, s.cluster)
    forward, backward = gather, gather + scatter
    if s.software.overlap_data:
        forward = max(0.0, forward - cost.forward)
        backward = max(0.0, backward - cost.input - cost.weight)
    return Cost(forward, backward, 0.0, forward, backward)


Run = Callable[[Setting, Sequence[Cost]], tuple[float, list[float], list[float]]]
"""(setting, costs of the stages) -> makespan of a step's schedule, when each rank ends, how long it computes."""


def pipeline(s: Setting, costs: Sequence[Cost]) -> tuple[float, list[float], list[float]]:
    """Makespan of a step's schedule, when each rank ends, and how long it computes. Of many microbatches only some are
    simulated: once the pipeline is full, each further one takes as long as on the busiest rank."""
    m, p, v = s.microbatches, s.layout.pp, s.layout.virtual_stages
    if p == 1:
        busy = m * costs[0].seconds
        return busy, [busy], [busy]
    rank_of = memory.schedule(s.layout.schedule, p, min(m, 2), v).rank_of
    once = [0.0] * p
    for stage, cost in enumerate(costs):
        once[rank_of[stage]] += cost.seconds
    few = min(m, 2 * p + m % p)
    parts = tuple((c.forward, c.input, c.weight) for c in costs)
    makespan, ends = _simulated(s.layout.schedule, p, few, v, parts, tuple(transfers(s).items()))
    more = (m - few) * max(once)
    return makespan + more, [end + more for end in ends], [m * seconds for seconds in once]


@lru_cache(maxsize=512)
def _simulated(
    name: str,
    p: int,
    m: int,
    v: int,
    costs: tuple[tuple[float, float, float], ...],
    transfers: tuple[tuple[tuple[int, int], float], ...],
) -> tuple[float, list[float]]:
    """Makespan, and when each rank ends."""
    forward, inputs, weight = ([cost[i] for cost in costs] for i in range(3))
    price = Costs(forward, inputs, weight, transfer=dict(transfers))
    timeline = simulate(memory.schedule(name, p, m, v), price)
    return timeline.makespan, [row[-1].end for row in timeline.rows]


def transfers(s: Setting) -> dict[tuple[int, int], float]:
    """Seconds of an activation on its way from one position to another."""
    stride = s.layout.ranks // s.layout.pp
    size, gather = s.sizes.n * s.model.dim * s.sizes.e, 0.0
    if s.software.scatters_transfers and s.layout.tp > 1 and not s.layout.sp:
        gather = communication.all_gather(size, group(s.layout, s.cluster, "tp"), s.cluster)
        size /= s.layout.tp
    found, p = {}, s.layout.pp
    for a, b in [(a, (a + step) % p) for a in range(p) for step in (1, -1)]:
        crosses = a * stride // s.cluster.per_node != b * stride // s.cluster.per_node
        found[a, b] = communication.send(size, crosses, s.cluster) + gather
    return found


def data_parallel(s: Setting, own: Elements, backward: float, forward: float) -> tuple[float, float]:
    """Seconds that the sum of gradients, and the gathering of weights, add to a step of a rank that has these elements.
    backward, forward: of one of its microbatches, beside which they run."""
    layout, b = s.layout, s.software.states[s.dtype]
    blocks = max(1, s.model.layers // layout.pp)
    reduced = gathered = 0.0
    for computes, keeps, kind in own.groups():
        if not computes:
            continue
        if layout.zero == 0:
            summing = group(layout, s.cluster, f"{kind}dp" if kind else "batch")
            reduced += communication.all_reduce(computes * b.reduce, summing, s.cluster)
            continue
        shards = group(layout, s.cluster, f"{kind}shard")
        if layout.dp_replicate > 1:
            replicas = group(layout, s.cluster, "replicate")
            reduced += communication.all_reduce(keeps * b.reduce, replicas, s.cluster)
        if layout.zero == 1:
            reduced += communication.reduce_scatter(computes * b.reduce, shards, s.cluster)
        if layout.zero < 3:
            gathered += communication.all_gather(computes * b.working, shards, s.cluster)
    if s.software.overlap_data:
        return unhidden(reduced, backward, blocks), unhidden(gathered, forward, blocks)
    return reduced, gathered


def unhidden(seconds: float, beside: float, blocks: int) -> float:
    """What computing does not hide of messages block by block: those of the last have nothing beside them."""
    return max(seconds / blocks, seconds - beside * (1 - 1 / blocks))


def optimizer(s: Setting, own: Elements) -> float:
    """Seconds of the norm, the update and the refreshed weights: all bytes of the states, read and written."""
    b = s.software.states[s.dtype]
    kept = own.keeps if s.layout.zero else own.computes
    size = kept * (2 * b.gradient + 2 * (b.master or b.working) + 2 * b.moments + b.working)
    norm = communication.all_reduce(4, group(s.layout, s.cluster, "all"), s.cluster)
    return s.software.optimizer_passes * rates.stream(size, s.cluster.device) + 2 * norm


def step(s: Setting, run: Run = pipeline) -> Step:
    """Seconds of an optimizer step. run: what says how long the schedule takes."""
    costs = stage_costs(s)
    makespan, ends, busy = run(s, costs)
    p, m = s.layout.pp, s.microbatches
    rank_of = memory.schedule(s.layout.schedule, p, 2, s.layout.virtual_stages).rank_of if p > 1 else (0,)
    extra, waits = 0.0, [0.0] * p
    ranks = memory.rank_elements(s.model, s.layout, s.software.partition)
    reduced = gathered = updated = 0.0
    for position in range(p):
        mine = [costs[stage] for stage, rank in enumerate(rank_of) if rank == position]
        backward, forward = sum(c.input + c.weight for c in mine), sum(c.forward for c in mine)
        r, g = data_parallel(s, ranks[position], backward, forward)
        u = optimizer(s, ranks[position])
        waits[position] = m * sum(c.sent for c in mine)
        late = ends[position] + r + g + u - makespan
        if late > extra:
            extra, reduced, gathered, updated = late, r, g, u
    tied = _tied(s)
    worst = max(range(p), key=lambda position: busy[position])
    seconds = makespan + max(0.0, extra) + tied + s.software.step
    exposed = {"model": waits[worst], "data": max(0.0, min(extra, reduced + gathered)) + tied}
    compute = busy[worst] - waits[worst] + updated + s.software.step
    bubble = seconds - compute - sum(exposed.values())
    terms = [(f"stage {i} forward", c.forward) for i, c in enumerate(costs)]
    terms += [(f"stage {i} backward", c.input + c.weight) for i, c in enumerate(costs)]
    terms += [
        ("of which the slowest of the devices", makespan * (1 - 1 / rates.slowest(s.layout.ranks))),
        ("pipeline, first start to last end", makespan),
        ("gradients summed, not hidden", reduced),
        ("weights gathered, not hidden", gathered),
        ("optimizer", updated),
        ("tied embedding summed", tied),
        ("other, a step", s.software.step),
    ]
    return Step(seconds, compute, exposed, max(0.0, bubble), terms)


def _tied(s: Setting) -> float:
    """The first and the last stage add up the gradient of the embedding that they share."""
    tied = memory.elements(s.model, s.layout)[3].computes
    if s.layout.pp == 1 or not tied:
        return 0.0
    ends = communication.Group(2, 1 if group(s.layout, s.cluster, "pp").nodes > 1 else 2)
    return communication.all_reduce(tied * s.software.states[s.dtype].reduce, ends, s.cluster)
