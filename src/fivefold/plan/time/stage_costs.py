"""Seconds of a microbatch on each pipeline stage (operations, recomputation, messages, the host's time), and of the
schedule, which the simulator runs with these costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from fivefold.models.operations import Message, Operation
from fivefold.models.recomputation import region
from fivefold.plan.memory import model_states
from fivefold.plan.messages import communication
from fivefold.plan.setting import Setting, schedule
from fivefold.plan.time.cost import Cost, forward_flops, message, operation, part, slowest, together
from fivefold.plan.time.sync_costs import accumulate, per_microbatch
from fivefold.schedules.pipeline import (
    SCHEDULES,
    Costs,
    shown,
    simulate,
    simulate_oversubscribed,
    splits_backward,
)
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import stages_of
from fivefold.sharding.tiers import partitions


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


def parts(s: Setting) -> Parts:
    """Costs of a setting's operations, for any layout with these axes."""
    blocks = {mixed: (ops, [operation(op, s) for op in ops]) for mixed, ops in s.work.block.items()}
    end = part(s.work.end, s)
    if s.software.loss == "chunks":  # which computes its gradients in forward
        loss = part([op for op in s.work.end if op.name != "norm"], s)
        end = part([op for op in s.work.end if op.name == "norm"], s)
        end += Cost(loss.seconds, sent_forward=loss.sent, host=loss.host)
    return Parts(blocks, part(s.work.begin, s), end)


def block_cost(s: Setting, number: int, shared: Parts) -> Cost:
    """Cost of a block for one microbatch, with ZeRO's communication per microbatch."""
    cost = computed(s, s.card.is_mixed(number), shared, s.recompute[number])
    own = model_states.elements(s.model, s.layout).blocks[number]
    cost += accumulate(own.computes, s)
    return cost + per_microbatch(own, cost, s)


def computed(s: Setting, mixed: bool, shared: Parts, mode: str) -> Cost:
    """Cost of a block with this mode of recomputation for one microbatch, with the host time to issue its
    operations."""
    layout, machine = s.layout, s.cluster.machine
    cost = shared.block(mixed, s, mode)
    if partitions(layout.offload, layout.recompute, layout.tp, layout.sp):
        # tensor-parallel ranks keep a part each of the input of a block that runs again, and gather it
        seconds = message(Message("all_gather", "tp", s.activation), s, True)
        cost += Cost(input=seconds, sent_backward=seconds)
    if not (machine and machine.on_cpu):  # issuing operations may take longer than computing them
        host = cost.host + s.software.host
        backward = cost.input + cost.weight
        scale = max(1.0, host / backward) if backward else 1.0
        return cost._replace(
            forward=max(cost.forward, host), input=cost.input * scale, weight=cost.weight * scale, host=host
        )
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
    splits = layout.pp > 1 and splits_backward(layout.schedule, layout.pp, layout.stages_per_rank)
    return layout.tp > 1 or splits


def recomputed(s: Setting) -> float:
    """FLOPs that backward repeats, as a share of the model's."""
    late, again, total = saves_late(s.layout), 0.0, sum(forward_flops(op) for op in s.work.end)
    for (mixed, mode), count in Counter(zip(s.card.mixed, s.recompute, strict=True)).items():
        used = region(mode, s.software)
        for op in s.work.block[mixed]:
            total += count * forward_flops(op)
            again += count * forward_flops(op) * used.repeated(op, late)
    return again / (3 * total)  # backward takes twice as many as forward


def stage_costs(s: Setting, shared: Parts | None = None) -> list[Cost]:
    """Cost of each pipeline stage for one microbatch. shared: the layout's `parts`, if already known."""
    shared = shared or parts(s)
    elements, mixed, modes = model_states.elements(s.model, s.layout), s.card.mixed, s.recompute
    kinds: dict[tuple[bool, str], Cost] = {}
    sums: dict[tuple[tuple[bool, str], ...], Cost] = {}  # equal stages are summed once
    costs = []
    for numbers in s.stages:
        blocks = tuple((mixed[number], modes[number]) for number in numbers)
        if blocks not in sums:
            for kind, number in zip(blocks, numbers, strict=True):
                if kind not in kinds:
                    kinds[kind] = block_cost(s, number, shared)
            sums[blocks] = sum((kinds[kind] for kind in blocks), Cost())
        costs.append(sums[blocks])
    costs[0] += shared.begin
    costs[-1] += shared.end
    costs[-1] += accumulate(elements.behind.computes + elements.tied.computes, s)
    for position in range(s.layout.pp if s.layout.zero > 1 else 0):
        mine = stages_of(s.layout, position)
        costs[0 if 0 in mine else mine[-1]] += outside_blocks(s, position)
    if s.cluster.on_cpu:
        costs = [cost + _host_of_stage(s, stage, len(costs)) for stage, cost in enumerate(costs)]
    slower = slowest(s.layout.ranks, s.cluster.device.spread)
    costs = [cost.slowed(slower) for cost in costs]
    if not s.software.overlap_pipeline and s.layout.pp > 1:
        wait = max(seconds for (a, b), seconds in transfers(s).items() if b == a + 1)
        costs = [cost + Cost(wait, wait, 0, wait, wait) for cost in costs]
    return costs


def outside_blocks(s: Setting, position: int) -> Cost:
    """Cost of the messages of data parallelism that a rank of a pipeline position sends in every microbatch for
    parameters outside of blocks."""
    return per_microbatch(model_states.outside_blocks(s, position), Cost(), s)


def _host_of_stage(s: Setting, stage: int, stages: int) -> Cost:
    """Python time of a microbatch outside its blocks, half at each end of the model.

    A pipeline adds the start of each stage, and the CPU's copies of sent activations.
    """
    machine = s.cluster.machine
    assert machine is not None
    ends = 0.5 * ((stage == 0) + (stage == stages - 1)) * machine.overhead("microbatch")
    if s.layout.pp > 1:
        send = communication.send(s.activation, False, s.cluster)
        ends += machine.overhead("stage") * s.layout.pp / stages
        ends += 2 * communication.held(send, s.group("pp"), s.cluster)
    return Cost(0.4 * ends, 0.6 * ends)


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
    rank_of = s.schedule(min(m, 2)).rank_of
    once = [0.0] * p
    for stage, cost in enumerate(costs):
        once[rank_of[stage]] += cost.seconds
    few = shown(m, p)
    parts = tuple(cost.timed for cost in costs)
    at_once = p / oversubscription  # number of pipeline ranks that can compute at full speed
    makespan, ends = _simulated(s.layout.schedule, p, few, v, parts, tuple(transfers(s).items()), at_once)
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
    built = schedule(name, p, m, v)
    timeline = simulate_oversubscribed(built, price, at_once) if at_once < p else simulate(built, price)
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
