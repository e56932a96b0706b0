"""Predicts the step time: the model's parts, data parallelism, and the pipeline, whose schedule the simulator runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from fivefold.models.card import card_of
from fivefold.models.operations import Matmul, Operation, Work
from fivefold.models.recomputation import of_blocks, region
from fivefold.optim import OPTIMIZERS, rounding_traffic, update_traffic
from fivefold.plan import communication, memory, offload, operations, outer, rates, volume
from fivefold.plan.communication import exposed, group, held
from fivefold.plan.cost import Cost, Setting, operation, part, together
from fivefold.plan.measured import Measured
from fivefold.plan.memory import Elements
from fivefold.precision import DTYPES, MASTER, PRECISIONS
from fivefold.schedules.collectives.choose import LIBRARY
from fivefold.schedules.compression import NONE, compressor
from fivefold.schedules.overlap import exposed_in_pieces
from fivefold.schedules.pipeline import Costs, simulate, simulate_oversubscribed, splits_backward
from fivefold.spread.layout import Layout
from fivefold.spread.parts import sharing_group, stages_of
from fivefold.spread.tiers import NOT_OFFLOADED
from fivefold.spread.units import Sync, bucket_bytes, scattered_once


@dataclass
class Step:
    """Seconds of one optimizer step.

    compute: seconds that the busiest rank computes, with the optimizer. exposed: exposed communication by axis. bubble:
    the rest, in which it waits for other stages. terms: (name, seconds) of each part.
    """

    seconds: float
    compute: float
    exposed: dict[str, float]
    bubble: float
    terms: list[tuple[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Parts:
    """Costs of a model's operations for one microbatch.

    They depend on the tensor, context and expert axes, but not on the pipeline or the sharding of states, so many
    layouts share them. operations: of a block without experts (False) and with (True), with their costs. begin, end:
    the parts before and after the blocks.
    """

    operations: dict[bool, tuple[list[Operation], list[Cost]]]
    begin: Cost
    end: Cost
    blocks: dict[tuple[bool, str, bool], Cost] = field(default_factory=dict)

    def block(self, mixed: bool, s: Setting, mode: str) -> Cost:
        """Cost of a block, with what this mode recomputes."""
        key = mixed, mode, saves_late(s.layout)
        if key not in self.blocks:
            self.blocks[key] = together(*self.operations[mixed], s, *key[1:])
        return self.blocks[key]


def parts(s: Setting, work: Work) -> Parts:
    """Costs of the operations `work`, for any layout with these axes."""
    found = {mixed: (ops, [operation(op, s) for op in ops]) for mixed, ops in work.block.items()}
    return Parts(found, part(work.begin, s), end_cost(s, work.end))


def block_cost(s: Setting, number: int, shared: Parts) -> Cost:
    """Cost of a block for one microbatch, with ZeRO's communication per microbatch."""
    mode = of_blocks(s.layout.recompute, s.model.layers)[number]
    cost = computed(s, card_of(s.model).is_mixed(number), shared, mode)
    own = memory.elements(s.model, s.layout)[0][number]
    cost += accumulate(own.computes, s)
    return cost + within_step(own, cost, s)


def computed(s: Setting, mixed: bool, shared: Parts, mode: str) -> Cost:
    """Cost of a block with this mode of recomputation for one microbatch, with the host time to issue its
    operations."""
    cost = shared.block(mixed, s, mode)
    if s.cluster.machine and s.cluster.machine.on_cpu:
        return cost + (_host(s.cluster.machine, s.layout, mode) + _waits(cost, s, mode))
    return (cost + Cost(host=s.software.host)).bound


def saves_late(layout: Layout) -> bool:
    """True if linear layers save their inputs after their matmuls: those that communicate, or defer their weight
    gradients (parallel/recompute.py)."""
    splits = layout.pp > 1 and splits_backward(layout.schedule, layout.pp, layout.stages_per_rank)
    return layout.tp > 1 or splits


def recomputed(s: Setting) -> float:
    """FLOPs that backward repeats, as a share of the model's."""
    card, late = card_of(s.model), saves_late(s.layout)
    work, again = card.work(s.sizes, s.software), 0.0
    total = sum(operations.flops(op) for op in work.end)
    kinds = Counter(zip(card.mixed, of_blocks(s.layout.recompute, s.model.layers), strict=True))
    for (mixed, mode), count in kinds.items():
        used = region(mode, s.software)
        for op in work.block[mixed]:
            total += count * operations.flops(op)
            again += count * operations.flops(op) * used.repeated(op, late)
    return again / (3 * total)  # backward takes twice as many as forward


def _host(machine: Measured, layout: Layout, mode: str) -> Cost:
    """Python and dispatch of a block on a CPU that also computes. About two fifths of it is in forward."""
    block = machine.overhead("block")
    if layout.shards > 1:
        block += machine.overhead(f"zero{layout.zero}")
    return Cost(0.4 * block, (0.6 + 0.4 * region(mode).host) * block)


def _waits(cost: Cost, s: Setting, mode: str) -> Cost:
    """Measured time of a block's axes on this machine beyond the sum of its operations and messages.

    Ranks wait for each other, and on oversubscribed cores others compute meanwhile. Two fifths of it is in forward.
    """
    machine, layout, elements = s.cluster.machine, s.layout, s.sizes.N * s.model.dim
    assert machine is not None
    axes = [("sp" if layout.sp else "tp")] * (layout.tp > 1) + [layout.cp_method] * (layout.cp > 1)
    seconds = sum(machine.waits(axis, elements, layout.ranks) for axis in axes)
    forward = max(0.4 * seconds, -cost.sent_forward)
    backward = max((0.6 + 0.4 * region(mode).host) * seconds, -cost.sent_backward)
    return Cost(forward, backward, 0.0, forward, backward)


def end_cost(s: Setting, ops: Sequence[Operation]) -> Cost:
    """Cost of the last norm, the output layer and the loss. A chunked loss computes its gradients in forward."""
    if s.software.loss != "chunks":
        return part(ops, s)
    loss = part([op for op in ops if op.name != "norm"], s)
    made = Cost(loss.seconds, sent_forward=loss.sent, host=loss.host)
    return part([op for op in ops if op.name == "norm"], s) + made


def stage_costs(s: Setting, shared: Parts | None = None) -> list[Cost]:
    """Cost of each pipeline stage for one microbatch. shared: the layout's `parts`, if already known."""
    shared = shared or parts(s, card_of(s.model).work(s.sizes, s.software))
    counted = memory.elements(s.model, s.layout)
    costs = _blocks(s, shared)
    costs[0] += shared.begin
    costs[-1] += shared.end
    costs[-1] += accumulate(counted[2].computes + counted[3].computes, s)
    for position in range(s.layout.pp if s.layout.zero > 1 else 0):
        mine = stages_of(s.layout, position)
        costs[0 if 0 in mine else mine[-1]] += _outside_blocks(s, mine, len(costs))
    if s.cluster.machine and s.cluster.machine.on_cpu:
        costs = [cost + _host_of_stage(s, stage, len(costs)) for stage, cost in enumerate(costs)]
    slower = rates.slowest(s.layout.ranks, s.cluster.device.spread)
    costs = [cost.slowed(slower) for cost in costs]
    if not s.software.overlap_pipeline and s.layout.pp > 1:
        wait = max(seconds for (a, b), seconds in transfers(s).items() if b == a + 1)
        costs = [cost + Cost(wait, wait, 0, wait, wait) for cost in costs]
    return costs


def _outside_blocks(s: Setting, mine: Sequence[int], stages: int) -> Cost:
    """Cost of the messages of data parallelism that a rank with the stages `mine` of so many sends in every microbatch
    for parameters outside of blocks."""
    return within_step(memory.outside_blocks(s.model, s.layout, mine, stages), Cost(), s)


def _blocks(s: Setting, shared: Parts) -> list[Cost]:
    """Cost of the blocks of each stage. Equal stages are summed once."""
    mixed, modes = card_of(s.model).mixed, of_blocks(s.layout.recompute, s.model.layers)
    kinds: dict[tuple[bool, str], Cost] = {}
    sums: dict[tuple[tuple[bool, str], ...], Cost] = {}
    costs = []
    for numbers in memory.stages(s.model, s.layout, s.software.partition):
        blocks = tuple((mixed[number], modes[number]) for number in numbers)
        if blocks not in sums:
            for kind, number in zip(blocks, numbers, strict=True):
                if kind not in kinds:
                    kinds[kind] = block_cost(s, number, shared)
            sums[blocks] = sum((kinds[kind] for kind in blocks), Cost())
        costs.append(sums[blocks])
    return costs


def _host_of_stage(s: Setting, stage: int, stages: int) -> Cost:
    """Python time of a microbatch outside its blocks, half at each end of the model.

    A pipeline adds the start of each stage, and the CPU's copies of sent activations.
    """
    machine = s.cluster.machine
    assert machine is not None
    ends = 0.5 * ((stage == 0) + (stage == stages - 1)) * machine.overhead("microbatch")
    if s.layout.pp > 1:
        send = communication.send(s.sizes.n * s.model.dim * s.sizes.e, False, s.cluster)
        ends += machine.overhead("stage") * s.layout.pp / stages
        ends += 2 * held(send, s.group("pp"), s.cluster)
    return Cost(0.4 * ends, 0.6 * ends)


def accumulate(elements: float, s: Setting) -> Cost:
    """Cost of adding a microbatch's gradient to the sum."""
    measured = s.cluster.device.measured
    if s.microbatches == 1 and not PRECISIONS[s.mode].copies and not measured:
        return Cost()
    if (
        measured and s.layout.zero and not scattered_once(s.layout.zero, s.layout.pp)
    ):  # only the rank's own rows are summed
        return Cost()
    size = elements * (s.sizes.e + 2 * s.states.gradient)
    return Cost(weight=rates.stream(size, s.cluster.device, "accumulate", s.dtype))


def within_step(own: Elements, cost: Cost, s: Setting) -> Cost:
    """Cost of the messages of data parallelism that a block sends in every microbatch.

    Those that the software overlaps run beside the neighbouring block, which costs as much. Beside those of the
    parameters outside of blocks, which are needed first and summed last, there is nothing.
    """
    forward = scattered = into = out = 0.0
    busy = [0.0, 0.0]  # seconds of gathers and scatters in which the CPU itself copies
    for sync, seconds, copied in synced(own, s):
        if sync.each:
            busy[sync.what != "gather"] += held(seconds, s.group(sync.group), s.cluster)
        if sync.each and sync.what == "gather":  # before forward and before backward
            forward, into = forward + seconds, into + copied
        elif sync.each:
            scattered, out = scattered + seconds, out + copied
    if not forward + scattered:
        return Cost()
    backward = forward + scattered
    if s.software.overlap_data:
        forward = exposed(forward, busy[0], cost.forward)
        alone, copying = (0.0, sum(busy)) if s.software.overlap_scatter else (scattered, busy[0])
        backward = alone + exposed(backward - alone, copying, cost.input + cost.weight)
    return Cost(forward + into, backward + into + out, 0.0, forward, backward)


PRICES = {
    "gather": communication.all_gather,
    "scatter": communication.scatter_gradients,
    "sum": communication.all_reduce,
}


def synced(own: Elements, s: Setting) -> Iterator[tuple[Sync, float, float]]:
    """(message, its seconds, seconds of FSDP2's copies for it) of data parallelism for a rank's elements."""
    for (_, keeps, expert), (_, still) in zip(own.groups(), own.frozen_groups(), strict=True):
        ranks = sharing_group(s.layout, expert)[1]
        whole = keeps * ranks
        for sync, size in volume.synced(s, whole, expert, trained=whole - still * ranks):
            if s.layout.compress != NONE:
                continue  # see compressed_sums
            among = group(s.layout, s.cluster, sync.group)
            by = communication.summed_by(s.layout.all_reduce, among, s.cluster)
            if sync.what == "sum" and by != LIBRARY:
                number = 1 if sync.rows else bucket_number(s, whole)
                seconds = number * communication.sum_gradients(size / number, among, s.cluster, by)
            else:
                price = (
                    communication.all_to_all if sync.blocks and sync.what == "scatter" else PRICES[sync.what]
                )
                seconds = price(size, among, s.cluster)
            yield sync, seconds, _copied(sync, keeps, whole, s)


def bucket_number(s: Setting, elements: float) -> int:
    """About how many buckets these gradients of a flat buffer have."""
    gradient = DTYPES[MASTER].bytes
    return max(1, math.ceil(elements * gradient / bucket_bytes(s.layout)))


def _copied(sync: Sync, keeps: float, whole: float, s: Setting) -> float:
    """Seconds of FSDP2's copies: into and out of a gather, with its cast, or into a scatter; and of ZeRO++'s, which
    encode and decode.

    On an accelerator they are negligible beside the messages.
    """
    device, e, gather = s.cluster.device, s.sizes.e, sync.what == "gather"
    if not device.measured or sync.what == "sum":
        return 0.0
    moved = 0.0
    if sync.group != "across":
        moved += keeps * (4 + e) + 2 * whole * e if gather else whole * (e + 4)
    if sync.blocks or sync.group == "inside":
        number, of = sync.blocks.per_element if sync.blocks else e, sync.part * whole
        moved += (keeps if gather else of) * (e if gather else 4) + of * (2 * number + (e if gather else 4))
    return rates.stream(moved, device, "copy", s.dtype)


PipelineTimer = Callable[[Setting, Sequence[Cost]], tuple[float, list[float], list[float]]]
"""(setting, costs of the stages) -> (makespan of the schedule, end of each rank, compute time of each), seconds."""


def pipeline(s: Setting, costs: Sequence[Cost]) -> tuple[float, list[float], list[float]]:
    """Makespan of a step's schedule, end of each rank, and compute time of each rank.

    Only some of many microbatches are simulated. Once the pipeline is full, each further one takes as long as on the
    busiest rank.
    """
    m, p, v = s.microbatches, s.layout.pp, s.layout.virtual_stages
    oversubscription = s.cluster.oversubscription
    if p == 1:
        busy = m * costs[0].slowed(oversubscription).seconds
        return busy, [busy], [busy]
    rank_of = memory.schedule(s.layout.schedule, p, min(m, 2), v).rank_of
    once = [0.0] * p
    for stage, cost in enumerate(costs):
        once[rank_of[stage]] += cost.seconds
    few = min(m, 2 * p + m % p)
    parts = tuple(cost.timed for cost in costs)
    at_once = p / oversubscription  # number of pipeline ranks that can compute at full speed
    makespan, ends = _simulated(s.layout.schedule, p, few, v, parts, tuple(transfers(s).items()), at_once)
    once = [seconds - _hidden(s, costs, rank) for rank, seconds in enumerate(once)]
    once = [max(seconds, sum(once) / at_once) if oversubscription > 1 else seconds for seconds in once]
    more = (m - few) * max(once)
    return makespan + more, [end + more for end in ends], [m * seconds for seconds in once]


def pipeline_costs(costs: Sequence[tuple[float, ...]], transfers: Mapping[tuple[int, int], float]) -> Costs:
    """What a schedule's simulation takes. costs: of each stage forward, input, weight, and the waits for experts' rows
    in forward and in backward, which pairs hide."""
    forward, inputs, weight, *rows = ([cost[i] for cost in costs] for i in range(len(costs[0])))
    return Costs(forward, inputs, weight, transfer=transfers, messages=list(zip(*rows, strict=True)))


def _hidden(s: Setting, costs: Sequence[Cost], rank: int) -> float:
    """Seconds per microbatch that a rank's pairs hide once the pipeline is full."""
    schedule = memory.schedule(s.layout.schedule, s.layout.pp, 2 * s.layout.pp, s.layout.virtual_stages)
    price = pipeline_costs([cost.timed for cost in costs], {})
    pairs = {(a.stage, b.stage) for a, b in schedule.pairs.items() if schedule.rank_of[a.stage] == rank}
    return sum(price.hidden(*pair) for pair in pairs)


@lru_cache(maxsize=512)
def _simulated(
    name: str,
    p: int,
    m: int,
    v: int,
    costs: tuple[tuple[float, ...], ...],
    transfers: tuple[tuple[tuple[int, int], float], ...],
    at_once: float = math.inf,
) -> tuple[float, list[float]]:
    """Makespan and the end of each rank."""
    price = pipeline_costs(costs, dict(transfers))
    schedule = memory.schedule(name, p, m, v)
    timeline = simulate_oversubscribed(schedule, price, at_once) if at_once < p else simulate(schedule, price)
    return timeline.makespan, [row[-1].end for row in timeline.rows]


def transfers(s: Setting) -> dict[tuple[int, int], float]:
    """Seconds to send an activation from one pipeline rank to another."""
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
    """Seconds that gradient sums and weight gathers add to a step of a rank with these elements.

    backward, forward: seconds of one of its microbatches, with which they overlap.
    """
    blocks = max(1, s.model.layers // s.layout.pp)
    reduced = gathered = alone = 0.0
    copies = [0.0, 0.0]  # into scatters, out of gathers
    busy = [0.0, 0.0]  # seconds of sums and gathers in which the CPU itself copies
    for sync, seconds, copied in synced(own, s):
        if sync.each:
            continue
        if sync.what == "scatter" and not s.software.overlap_scatter:
            alone, copies[0] = alone + seconds, copies[0] + copied
            continue
        busy[sync.what == "gather"] += held(seconds, s.group(sync.group), s.cluster)
        if sync.what == "gather":
            gathered, copies[1] = gathered + seconds, copies[1] + copied
        else:
            reduced, copies[0] = reduced + seconds, copies[0] + copied
    if s.layout.compress != NONE:
        reduced, *after = compressed_sums(s, own)
        copies[0], busy[0] = sum(after), held(reduced, s.group("batch"), s.cluster)
    if s.software.overlap_data:
        reduced = exposed_in_pieces(reduced, busy[0], backward, summed_pieces(s, own))
        gathered = exposed_in_pieces(gathered, busy[1], forward, blocks)
    return reduced + alone + copies[0], gathered + copies[1]


def summed_pieces(s: Setting, own: Elements) -> int:
    """Number of messages by which a rank sums gradients while backward computes: one per block, unless buckets are
    larger. (Smaller ones are priced as one per block.)"""
    blocks = max(1, s.model.layers // s.layout.pp)
    if s.layout.zero:
        return blocks
    return max(1, min(blocks, sum(bucket_number(s, computes) for computes, _, _ in own.groups() if computes)))


def compressed_sums(s: Setting, own: Elements) -> tuple[float, float, float]:
    """Seconds of a rank's compressed gradient sums: of the first messages, which overlap with backward; of those that
    follow; of encoding and decoding."""
    first = later = encoding = 0.0
    compress = compressor(s.layout.compress)
    for computes, _, expert in own.groups():
        messages = volume.compressed(s, expert) if computes else []
        seconds = [_seconds([(what, axis, size * computes)], s) for what, axis, size in messages]
        first, later = first + sum(seconds[:1]), later + sum(seconds[1:])
        if compress is not None and messages:
            encoding += s.cluster.oversubscription * rates.encoding(computes, compress, s.cluster.device)
    return first, later, encoding


def optimizer(s: Setting, own: Elements) -> float:
    """Seconds of the norm, the update and refreshing the weights, and of what all ranks agree on."""
    return update(s, own) + _seconds(volume.control(s), s)


def update(s: Setting, own: Elements) -> float:
    """Seconds of the norm, the update and refreshing the weights. They read and write all bytes of the states."""
    b = s.states
    kept = own.keeps - own.frozen[1] if s.layout.zero else own.computes - own.frozen[0]
    moved = update_traffic(b.gradient, b.master or b.working, b.moments, b.working)
    size = kept * (moved + rounding_traffic(b.copied))
    oversubscription = s.cluster.oversubscription
    once = oversubscription * rates.stream(size, s.cluster.device, "optimizer", s.dtype)
    return once * s.software.optimizer_passes * OPTIMIZERS[s.software.optimizer].reads


def whole_matrices(s: Setting, position: int) -> float:
    """Seconds of an update's matmuls on whole matrices, and of bringing their pieces together and back."""
    messages, products = volume.matrices(s, s.layout.rank({"pp": position})), 0.0
    for (*_, r, c), flops in volume.matrix_flops(s, position):
        one = Matmul(min(r, c), min(r, c), max(r, c), weight=False)
        products += (
            flops / (2 * one.m * one.n * one.k) * rates.products(one, s.cluster.device, s.rate, s.sizes.e)[0]
        )
    return s.cluster.oversubscription * products + _seconds(messages, s)


def shared_sums(s: Setting, position: int) -> tuple[float, float]:
    """Seconds of the gradient sums that a pipeline position does besides its replicas': (over the tensor axis, of tied
    embeddings)."""
    messages = volume.shared(s, position)
    tensor = [message for message in messages if message[1] == "tp"]
    return _seconds(tensor, s), _seconds([message for message in messages if message[1] != "tp"], s)


def step(s: Setting, run: PipelineTimer = pipeline, shared: Parts | None = None) -> Step:
    """The time of an optimizer step. run: the function that times the schedule. shared: as in `stage_costs`."""
    costs = stage_costs(s, shared)
    makespan, ends, busy = run(s, costs)
    p, m = s.layout.pp, s.microbatches
    rank_of = memory.schedule(s.layout.schedule, p, 2, s.layout.virtual_stages).rank_of if p > 1 else (0,)
    extra, waits = 0.0, [0.0] * p
    ranks = memory.rank_elements(s.model, s.layout, s.software.partition)
    reduced = gathered = updated = moved = 0.0
    for position in range(p):
        mine = [costs[stage] for stage, rank in enumerate(rank_of) if rank == position]
        backward, forward = sum(c.input + c.weight for c in mine), sum(c.forward for c in mine)
        forward -= _outside_blocks(s, stages_of(s.layout, position), len(costs)).sent_forward
        r, g = data_parallel(s, ranks[position], backward, forward)
        u = optimizer(s, ranks[position]) + whole_matrices(s, position)
        away = offload.exposed(s, offload.Computing(forward, backward, u), ranks[position])
        waits[position] = m * (sum(c.sent for c in mine) - (_hidden(s, costs, position) if p > 1 else 0.0))
        late = ends[position] + r + g + u + away - makespan
        if late > extra:
            extra, reduced, gathered, updated, moved = late, r, g, u, away
    tensor_sums, tied_sums = max((shared_sums(s, position) for position in range(p)), key=sum)
    worst = max(range(p), key=lambda position: busy[position])
    encoding = max(compressed_sums(s, own)[2] for own in ranks) if s.layout.compress != NONE else 0.0
    besides = fixed(s)
    inner = makespan + max(0.0, extra) + tensor_sums + tied_sums + besides
    apart = outer.seconds(s, inner) / s.sites.every
    seconds = inner + apart
    data = max(0.0, min(extra, reduced + gathered)) + tied_sums
    exposed = {"model": waits[worst] + tensor_sums, "data": data} | ({"sites": apart} if apart else {})
    if s.layout.offload != NOT_OFFLOADED:
        exposed[offload.EXPOSED] = max(0.0, moved)
    compute = busy[worst] - waits[worst] + updated + min(0.0, moved) + besides
    bubble = seconds - compute - sum(exposed.values())
    terms = [(f"stage {i} forward", c.forward) for i, c in enumerate(costs)]
    terms += [(f"stage {i} backward", c.input + c.weight) for i, c in enumerate(costs)]
    terms += [
        (
            "slowest device, part of the next",
            makespan * (1 - 1 / rates.slowest(s.layout.ranks, s.cluster.device.spread)),
        ),
        ("pipeline, first start to last end", makespan),
        ("exposed gradient sums", reduced),
        ("exposed weight gathers", gathered),
        *([("encoding of gradients, part of their sums", encoding)] if s.layout.compress != NONE else []),
        ("optimizer", updated),
        *([("offload: exposed I/O, less what the update saves", moved)] if moved else []),
        ("gradient sums over the tensor axis", tensor_sums),
        ("sum of tied embeddings", tied_sums),
        ("fixed per step", besides),
        *([("outer steps of the sites, on average", apart)] if apart else []),
    ]
    return Step(seconds, compute, exposed, max(0.0, bubble), terms)


def fixed(s: Setting) -> float:
    """Fixed seconds per step: Python between its parts."""
    machine, layout = s.cluster.machine, s.layout
    if machine is None:
        return s.software.step
    per_block = machine.overhead("block step")
    if layout.shards > 1:
        per_block += machine.overhead(f"zero{layout.zero} step")
    return s.cluster.oversubscription * (machine.overhead("step") + per_block * s.model.layers / layout.pp)


def _seconds(messages: Iterable[volume.Sent], s: Setting) -> float:
    """Seconds of messages, one after the other."""
    total = 0.0
    for what, axis, size in messages:
        if what == "send":
            total += communication.send(size, s.group(axis).nodes > 1, s.cluster)
        elif what != "receive":  # which goes on beside a send
            total += getattr(communication, what)(size, s.group(axis), s.cluster)
    return total
