"""Seconds of a microbatch on each pipeline stage (operations, recomputation, messages, the host), of gradient sums and
weight gathers (within a microbatch, once per step, and what of them is exposed), and of the schedule, which the
simulator runs with the costs of the stages."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from fivefold.models.operations import ByKind, Kind, Message, Operation
from fivefold.models.recomputation import region
from fivefold.precision import DTYPES, MASTER, PRECISIONS
from fivefold.schedules.collectives.registry import LIBRARY
from fivefold.schedules.compression import NONE, compressor
from fivefold.schedules.pipeline import SCHEDULES, TUNED, Costs, simulate, simulate_oversubscribed
from fivefold.schedules.timelines import exposed_in_pieces
from fivefold.sharding.layout import Layout, changed
from fivefold.sharding.parts import ends_of, sharing_group, stages_of
from fivefold.sharding.tiers import partitions
from fivefold.sharding.units import Sync, bucket_bytes, scattered_once
from fivefold_plan.memory import model_states
from fivefold_plan.memory.model_states import Elements
from fivefold_plan.messages import communication, volume
from fivefold_plan.messages.communication import collective, exposed, held
from fivefold_plan.setting import Setting
from fivefold_plan.time.cost import Cost, forward_flops, message, operation, part, slowest, stream, together


@dataclass(frozen=True)
class Parts:
    """Costs of a model's operations for one microbatch.

    They depend on the tensor, context and expert axes, but not on the pipeline or the sharding of states, so many
    layouts share them. operations: of each kind of block, with their costs. begin, end: the parts before and after
    the blocks.
    """

    operations: ByKind[tuple[list[Operation], list[Cost]]]
    begin: Cost
    end: Cost
    blocks: dict[tuple[Kind, str, bool], Cost] = field(default_factory=dict)

    def block(self, second: bool, s: Setting, mode: str) -> Cost:
        """Cost of a block, with what this mode recomputes."""
        key = s.kind(second, mode), mode, saves_late(s.layout)
        if key not in self.blocks:
            self.blocks[key] = together(*self.operations[key[0]], s, *key[1:])
        return self.blocks[key]


def parts(s: Setting) -> Parts:
    """Costs of a setting's operations, for any layout with these axes."""
    blocks = ByKind(lambda kind: ((ops := s.work.block[kind]), [operation(op, s) for op in ops]))
    loss = [op for op in s.work.end if op.name.startswith(("output", "loss"))]
    last = part(loss, s)
    if s.software.loss == "chunks":  # which computes its gradients in forward
        last = Cost(last.seconds, sent_forward=last.sent)
    return Parts(blocks, part(s.work.begin, s), part([op for op in s.work.end if op not in loss], s) + last)


def block_cost(s: Setting, number: int, shared: Parts) -> Cost:
    """Cost of a block for one microbatch, with ZeRO's communication per microbatch."""
    cost = computed(s, s.card.second[number], shared, s.recompute[number])
    own = model_states.elements(s.model, s.layout).blocks[number]
    cost += accumulate(own.computes, s)
    return cost + per_microbatch(own, cost, s)


def computed(s: Setting, second: bool, shared: Parts, mode: str) -> Cost:
    """Cost of a block with this mode of recomputation for one microbatch, with the host time to issue its
    operations."""
    layout, machine = s.layout, s.cluster.machine
    cost = shared.block(second, s, mode)
    if partitions(layout.offload, layout.recompute, layout.tp, layout.sp):
        # tensor-parallel ranks keep a part each of the input of a block that runs again, and gather it
        seconds = message(Message("all_gather", "tp", s.activation), s, True)
        cost += Cost(input=seconds, sent_backward=seconds)
    if not (machine and machine.on_cpu):  # issuing operations may take longer than computing them
        host, backward = s.software.host, cost.input + cost.weight
        scale = max(1.0, host / backward) if backward else 1.0
        ahead = max(cost.forward, host)
        return cost._replace(forward=ahead, input=cost.input * scale, weight=cost.weight * scale)
    # Python and dispatch on a CPU that also computes; and measured time of a block's axes beyond the sum of its
    # operations and messages: ranks wait for each other, and on oversubscribed cores others compute meanwhile. About
    # two fifths of both is in forward.
    block, backward = machine.overhead("block"), 0.6 + 0.4 * region(mode).host
    if layout.shards > 1:
        block += machine.overhead(f"zero{layout.zero}")
    axes = [("sp" if layout.sp else "tp")] * (layout.tp > 1) + [layout.cp_method] * (layout.cp > 1)
    waits = sum(machine.waits(axis, s.sizes.N * s.model.dim, layout.ranks) for axis in axes)
    ahead, back = max(0.4 * waits, -cost.sent_forward), max(backward * waits, -cost.sent_backward)
    return cost + (Cost(0.4 * block, backward * block) + Cost(ahead, back, 0.0, ahead, back))


def saves_late(layout: Layout) -> bool:
    """True if linear layers save their inputs after their matmuls: those that communicate, or defer their weight
    gradients (parallel/recompute.py)."""
    return layout.tp > 1 or layout.splits_backward


def recomputed(s: Setting) -> float:
    """FLOPs that backward repeats, as a share of the model's."""
    late, again, total = saves_late(s.layout), 0.0, sum(forward_flops(op) for op in s.work.end)
    for (second, mode), count in Counter(zip(s.card.second, s.recompute, strict=True)).items():
        used = region(mode, s.software)
        for op in s.work.block[s.kind(second, mode)]:
            total += count * forward_flops(op)
            again += count * forward_flops(op) * used.repeated(op, late)
    return again / (3 * total)  # backward takes twice as many as forward


def stage_costs(s: Setting, shared: Parts | None = None) -> list[Cost]:
    """Cost of each pipeline stage for one microbatch. shared: the layout's `parts`, if already known."""
    shared = shared or parts(s)
    elements, second, modes = model_states.elements(s.model, s.layout), s.card.second, s.recompute
    kinds: dict[tuple[bool, str], Cost] = {}
    sums: dict[tuple[tuple[bool, str], ...], Cost] = {}  # equal stages are summed once
    costs = []
    for numbers in s.stages:
        blocks = tuple((second[number], modes[number]) for number in numbers)
        if blocks not in sums:
            for kind, number in zip(blocks, numbers, strict=True):
                if kind not in kinds:
                    kinds[kind] = block_cost(s, number, shared)
            sums[blocks] = sum((kinds[kind] for kind in blocks), Cost())
        costs.append(sums[blocks])
    for stage in range(len(costs)):
        first, last = ends_of(s.layout, [stage])
        costs[stage] += shared.begin if first else Cost()
        if last:
            costs[stage] += shared.end
            costs[stage] += accumulate(elements.behind.computes + elements.tied.computes, s)
    for position in range(s.layout.pp if s.layout.zero > 1 else 0):
        mine = stages_of(s.layout, position)
        outside = model_states.outside_blocks(s, position)
        costs[0 if 0 in mine else mine[-1]] += per_microbatch(outside, Cost(), s)
    if (machine := s.cluster.machine) and s.cluster.on_cpu:
        # Python time of a microbatch outside its blocks, half at each end of the model; a pipeline adds the start of
        # each stage, and the CPU's copies of sent activations
        for stage in range(len(costs)):
            ends = 0.5 * sum(ends_of(s.layout, [stage])) * machine.overhead("microbatch")
            if s.layout.pp > 1:
                send = communication.send(s.activation, False, s.cluster)
                ends += machine.overhead("stage") * s.layout.pp / len(costs)
                ends += 2 * held(send, s.group("pp"), s.cluster)
            costs[stage] += Cost(0.4 * ends, 0.6 * ends)
    slower = slowest(s.layout.ranks, s.cluster.device.spread)
    costs = [cost.slowed(slower) for cost in costs]
    if not s.software.overlap_pipeline and s.layout.pp > 1:
        wait = max(seconds for (a, b), seconds in transfers(s).items() if b == a + 1)
        costs = [cost + Cost(wait, wait, 0, wait, wait) for cost in costs]
    return costs


def pipeline(s: Setting, costs: Sequence[Cost]) -> tuple[float, list[float], list[float]]:
    """Makespan of a step's schedule, end of each rank, and compute time of each rank.

    Only some of many microbatches are simulated. Once the pipeline is full, each further one takes as long as on the
    busiest rank.
    """
    m, p = s.microbatches, s.layout.pp
    oversubscription = s.cluster.oversubscription
    if p == 1:
        busy = m * costs[0].slowed(oversubscription).seconds
        return busy, [busy], [busy]
    rank_of = s.schedule(min(m, 2)).rank_of
    once = [0.0] * p
    for stage, cost in enumerate(costs):
        once[rank_of[stage]] += cost.seconds / s.layout.copies  # each has its share of the microbatches
    few = s.layout.shown(m)
    parts = tuple(cost.timed for cost in costs)
    at_once = p / oversubscription  # number of pipeline ranks that can compute at full speed
    makespan, ends = _simulated(pipelined(s.layout), few, parts, tuple(transfers(s).items()), at_once)
    once = [seconds - hidden_by_pairs(s, costs, rank) for rank, seconds in enumerate(once)]
    once = [max(seconds, sum(once) / at_once) if oversubscription > 1 else seconds for seconds in once]
    more = (m - few) * max(once)
    return makespan + more, [end + more for end in ends], [m * seconds for seconds in once]


def pipeline_costs(costs: Sequence[tuple[float, ...]], transfers: Mapping[tuple[int, int], float]) -> Costs:
    """What a schedule's simulation takes. costs: of each stage forward, input, weight, and the waits for experts' rows
    in forward and in backward, which pairs hide."""
    forward, inputs, weight, *rows = ([cost[i] for cost in costs] for i in range(len(costs[0])))
    return Costs(forward, inputs, weight, transfer=transfers, messages=list(zip(*rows, strict=True)))


def hidden_by_pairs(s: Setting, costs: Sequence[Cost], rank: int) -> float:
    """Seconds per microbatch that a rank's pairs hide once the pipeline is full."""
    if not SCHEDULES[s.layout.schedule].paired:
        return 0.0
    schedule = s.schedule(2 * s.layout.pp)
    price = pipeline_costs([cost.timed for cost in costs], {})
    pairs = {(a.stage, b.stage) for a, b in schedule.pairs.items() if schedule.rank_of[a.stage] == rank}
    return sum(price.hidden(*pair) for pair in pairs) / s.layout.copies


def of_longest(s: Setting, costs: Sequence[Cost]) -> str:
    """F:I:W:transfer of the longest stage, as `layout.zb_costs` has it. costs: of each stage."""
    longest = max(costs, key=lambda cost: cost.seconds)
    times = (longest.forward, longest.input, longest.weight, max(transfers(s).values()))
    return ":".join(f"{seconds / longest.forward:.3g}" for seconds in times)


def pipelined(layout: Layout) -> Layout:
    """What of a layout its pipeline schedule depends on; many layouts have the same."""
    kept = ("pp", "schedule", "virtual_stages", *TUNED)
    return changed(Layout(), **{name: getattr(layout, name) for name in kept})


@lru_cache(maxsize=512)
def _simulated(
    layout: Layout,
    m: int,
    costs: tuple[tuple[float, ...], ...],
    transfers: tuple[tuple[tuple[int, int], float], ...],
    at_once: float = math.inf,
) -> tuple[float, list[float]]:
    """Makespan and the end of each rank."""
    price, built = pipeline_costs(costs, dict(transfers)), layout.pipeline(m)
    timeline = (
        simulate_oversubscribed(built, price, at_once) if at_once < layout.pp else simulate(built, price)
    )
    return timeline.makespan, [row[-1].end for row in timeline.rows]


def transfers(s: Setting) -> dict[tuple[int, int], float]:
    """Seconds to send an activation from one pipeline rank to another."""
    stride, size, gather = s.layout.ranks // s.layout.pp, s.activation, 0.0
    if s.software.scatters_transfers and s.layout.tp > 1 and not s.layout.sp:
        gather = communication.collective("all_gather", size, s.group("tp"), s.cluster)
        size /= s.layout.tp
    found, p = {}, s.layout.pp
    for a, b in [(a, (a + step) % p) for a in range(p) for step in (1, -1)]:
        crosses = a * stride // s.cluster.per_node != b * stride // s.cluster.per_node
        found[a, b] = communication.send(size, crosses, s.cluster) + gather
    return found


def accumulate(elements: float, s: Setting) -> Cost:
    """Cost of adding a microbatch's gradient to the sum."""
    measured = s.cluster.device.measured
    if s.microbatches == 1 and not PRECISIONS[s.mode].copies and not measured:
        return Cost()
    if measured and s.layout.zero and not scattered_once(s.layout.zero, s.layout.pp):
        return Cost()  # only the rank's own rows are summed
    size = elements * (s.sizes.e + 2 * s.states.gradient)
    return Cost(weight=stream(size, s.cluster.device, "accumulate", s.dtype))


class Sent(NamedTuple):
    """Seconds of messages of data parallelism. gathered: of weights, before forward and before backward, or once per
    step. scattered: of gradients, with what sums them. into, out: of FSDP2's copies for gathers and for the others.
    gathering, scattering: of both messages in which the device cannot compute (`communication.held`)."""

    gathered: float = 0.0
    scattered: float = 0.0
    into: float = 0.0
    out: float = 0.0
    gathering: float = 0.0
    scattering: float = 0.0

    def and_of(self, sync: Sync, seconds: float, copied: float, holds: float) -> Sent:
        """With one more message."""
        a, b, into, out, gathering, scattering = self
        if sync.what == "gather":
            return Sent(a + seconds, b, into + copied, out, gathering + holds, scattering)
        return Sent(a, b + seconds, into, out + copied, gathering, scattering + holds)


def per_microbatch(own: Elements, cost: Cost, s: Setting) -> Cost:
    """Cost of the messages of data parallelism that a block sends in every microbatch.

    Those that the software overlaps run beside the neighbouring block, which costs as much. Beside those of the
    parameters outside of blocks, which are needed first and summed last, there is nothing.
    """
    gathered, scattered, into, out, gathering, scattering = sent(own, s)[1]
    if not gathered + scattered:
        return Cost()
    forward, backward = gathered, gathered + scattered
    if s.software.overlap_data:
        forward = exposed(forward, gathering, cost.forward)
        beside = s.software.overlap_scatter
        alone, copying = (0.0, gathering + scattering) if beside else (scattered, gathering)
        backward = alone + exposed(backward - alone, copying, cost.input + cost.weight)
    return Cost(forward + into, backward + into + out, 0.0, forward, backward)


def sent(own: Elements, s: Setting) -> tuple[Sent, Sent, float]:
    """Messages of data parallelism for a rank's elements: once per step, in every microbatch, and the seconds of
    scatters once per step that nothing hides; they are not in the first."""
    once, each, alone = Sent(), Sent(), 0.0
    for sync, seconds, copied in synced(own, s):
        holds = held(seconds, s.group(sync.group), s.cluster)
        if sync.each:
            each = each.and_of(sync, seconds, copied, holds)
        elif sync.what == "scatter" and not s.software.overlap_scatter:
            once, alone = once.and_of(sync, 0.0, copied, 0.0), alone + seconds
        else:
            once = once.and_of(sync, seconds, copied, holds)
    return once, each, alone


def synced(own: Elements, s: Setting) -> Iterator[tuple[Sync, float, float]]:
    """(message, its seconds, seconds of FSDP2's copies for it) of data parallelism for a rank's elements."""
    if s.layout.compress != NONE:
        return  # see compressed_sums
    for _, keeps, expert, _, still in own.groups():
        ranks = sharing_group(s.layout, expert)[1]
        whole = keeps * ranks
        for sync, size in volume.synced(s, whole, expert, trained=whole - still * ranks):
            yield sync, _seconds(sync, size, whole, s), _copied(sync, keeps, whole, s)


def _seconds(sync: Sync, size: float, whole: float, s: Setting) -> float:
    """Seconds of a message of data parallelism. whole: elements of its parameters on all ranks that share them."""
    among = s.group(sync.group)
    if sync.what == "gather":
        return communication.share_states("all_gather", size, among, s.cluster, s.layout.all_gather)
    if sync.what == "scatter":
        if sync.blocks:
            return collective("all_to_all", size, among, s.cluster)
        return communication.share_states("reduce_scatter", size, among, s.cluster, s.layout.reduce_scatter)
    by = communication.summed_by(s.layout.all_reduce, among, s.cluster)
    if by == LIBRARY:
        return collective("all_reduce", size, among, s.cluster)
    number = 1 if sync.rows else bucket_number(s, whole)
    return number * communication.sum_gradients(size / number, among, s.cluster, by)


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
    return stream(moved, device, "copy", s.dtype)


def per_step(s: Setting, own: Elements, backward: float, forward: float) -> tuple[float, float]:
    """Seconds that gradient sums and weight gathers add to a step of a rank with these elements.

    backward, forward: seconds of one of its microbatches, with which they overlap.
    """
    blocks = max(1, s.model.layers // s.layout.pp)
    once, _, alone = sent(own, s)
    if s.layout.compress != NONE:
        first, *after = compressed_sums(s, own)
        once = Sent(0.0, first, 0.0, sum(after), 0.0, held(first, s.group("batch"), s.cluster))
    reduced, gathered = once.scattered, once.gathered
    if s.software.overlap_data:
        reduced = exposed_in_pieces(reduced, once.scattering, backward, summed_pieces(s, own))
        gathered = exposed_in_pieces(gathered, once.gathering, forward, blocks)
    return reduced + alone + once.out, gathered + once.into


def summed_pieces(s: Setting, own: Elements) -> int:
    """Number of messages by which a rank sums gradients while backward computes: one per block, unless buckets are
    larger. (Smaller ones are priced as one per block.)"""
    blocks = max(1, s.model.layers // s.layout.pp)
    if s.layout.zero:
        return blocks
    return max(1, min(blocks, sum(bucket_number(s, computes) for computes, *_ in own.groups() if computes)))


def compressed_sums(s: Setting, own: Elements) -> tuple[float, float, float]:
    """Seconds of a rank's compressed gradient sums: of the first messages, which overlap with backward; of those that
    follow; of encoding and decoding."""
    first = later = encoding = 0.0
    compress = compressor(s.layout.compress)
    for computes, _, expert, *_ in own.groups():
        messages = volume.compressed(s, expert) if computes else []
        seconds = [message_seconds([(what, axis, size * computes)], s) for what, axis, size in messages]
        first, later = first + sum(seconds[:1]), later + sum(seconds[1:])
        if compress is not None and messages:
            device = s.cluster.device
            each = device.measured.encoding(compress.text) if device.measured else None
            if each is None:  # memory traffic
                took = stream(compress.passes * DTYPES[MASTER].bytes * computes, device, "copy", MASTER)
            else:
                took = computes * each
            encoding += s.cluster.oversubscription * took
    return first, later, encoding


def shared_sums(s: Setting, position: int) -> tuple[float, float]:
    """Seconds of the gradient sums that a pipeline position does besides its replicas': (over the tensor axis, of tied
    embeddings)."""
    messages = volume.shared(s, position)
    tensor = [message for message in messages if message[1] == "tp"]
    tied = [message for message in messages if message[1] != "tp"]
    return message_seconds(tensor, s), message_seconds(tied, s)


def message_seconds(messages: Iterable[volume.Sent], s: Setting) -> float:
    """Seconds of messages, one after the other."""
    total = 0.0
    for what, axis, size in messages:
        if what == "send":
            total += communication.send(size, s.group(axis).nodes > 1, s.cluster)
        elif what != "receive":  # which goes on beside a send
            total += collective(what, size, s.group(axis), s.cluster)
    return total


def _outer_elements(s: Setting, position: int) -> tuple[int, ...]:
    """Elements of each fragment on the first rank of a pipeline position, which has most."""
    rank = s.layout.rank({"pp": position})
    return tuple(sum(volume.outer_elements(s, rank, number)) for number in range(s.replica_groups.fragments))


def outer_seconds(s: Setting, inner: float = 0.0) -> float:
    """Seconds of all outer steps of `replica_groups.every` inner steps. Each fragment's messages go out together, and
    overlap with `replica_groups.overlap` inner steps of `inner` seconds. The slowest pipeline position decides."""
    longest, hidden = 0.0, inner * s.replica_groups.overlap
    for position in range(s.layout.pp if s.replica_groups.count > 1 else 0):
        rank, among, total = s.layout.rank({"pp": position}), s.group("replica_groups"), 0.0
        for number in range(s.replica_groups.fragments):
            messages = itertools.chain(*volume.outer(s, rank, number))
            sent = sum(collective(what, size, among, s.cluster) for what, size in messages)
            total += max(0.0, sent - hidden)
        # common weights and momentum are read and written; masters are read for the difference, and written
        moved = sum(_outer_elements(s, position)) * (2 * s.replica_groups.kept + 4 * DTYPES[MASTER].bytes)
        update = stream(moved, s.cluster.device, "optimizer", s.dtype)
        longest = max(longest, total + s.cluster.oversubscription * update)
    return longest


def outer_buffers(s: Setting, position: int) -> float:
    """Bytes of the outer gradients that are under way at once: a fragment's, or with overlap those of several."""
    return DTYPES[MASTER].bytes * sum(sorted(_outer_elements(s, position))[-s.replica_groups.at_once :])
