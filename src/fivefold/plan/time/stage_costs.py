"""Seconds of a microbatch on each pipeline stage: operations, recomputation, messages, and the host's time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from fivefold.models.operations import Message, Operation
from fivefold.models.recomputation import region
from fivefold.plan.cluster.measured import Measured
from fivefold.plan.memory import model_states, operations
from fivefold.plan.messages import communication
from fivefold.plan.messages.communication import held
from fivefold.plan.setting import Setting
from fivefold.plan.time import rates
from fivefold.plan.time.cost import Cost, message, operation, part, together
from fivefold.plan.time.pipeline import transfers
from fivefold.plan.time.sync_costs import accumulate, per_microbatch
from fivefold.schedules.pipeline import splits_backward
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
    found = {mixed: (ops, [operation(op, s) for op in ops]) for mixed, ops in s.work.block.items()}
    return Parts(found, part(s.work.begin, s), end_cost(s, s.work.end))


def block_cost(s: Setting, number: int, shared: Parts) -> Cost:
    """Cost of a block for one microbatch, with ZeRO's communication per microbatch."""
    cost = computed(s, s.card.is_mixed(number), shared, s.recompute[number])
    own = model_states.elements(s.model, s.layout).blocks[number]
    cost += accumulate(own.computes, s)
    return cost + per_microbatch(own, cost, s)


def computed(s: Setting, mixed: bool, shared: Parts, mode: str) -> Cost:
    """Cost of a block with this mode of recomputation for one microbatch, with the host time to issue its
    operations."""
    cost = shared.block(mixed, s, mode) + _gathered(s)
    if (machine := s.cluster.machine) and machine.on_cpu:
        return cost + (_host(machine, s.layout, mode) + _waits(cost, s, mode))
    return (cost + Cost(host=s.software.host)).bound


def _gathered(s: Setting) -> Cost:
    """Seconds to gather the input of a block that runs again, where tensor-parallel ranks keep a part each."""
    if not partitions(s.layout.offload, s.layout.recompute, s.layout.tp, s.layout.sp):
        return Cost()
    seconds = message(Message("all_gather", "tp", s.activation), s, True)
    return Cost(input=seconds, sent_backward=seconds)


def saves_late(layout: Layout) -> bool:
    """True if linear layers save their inputs after their matmuls: those that communicate, or defer their weight
    gradients (parallel/recompute.py)."""
    splits = layout.pp > 1 and splits_backward(layout.schedule, layout.pp, layout.stages_per_rank)
    return layout.tp > 1 or splits


def recomputed(s: Setting) -> float:
    """FLOPs that backward repeats, as a share of the model's."""
    late, again, total = saves_late(s.layout), 0.0, sum(operations.flops(op) for op in s.work.end)
    for (mixed, mode), count in Counter(zip(s.card.mixed, s.recompute, strict=True)).items():
        used = region(mode, s.software)
        for op in s.work.block[mixed]:
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
    shared = shared or parts(s)
    elements, costs = model_states.elements(s.model, s.layout), _blocks(s, shared)
    costs[0] += shared.begin
    costs[-1] += shared.end
    costs[-1] += accumulate(elements.behind.computes + elements.tied.computes, s)
    for position in range(s.layout.pp if s.layout.zero > 1 else 0):
        mine = stages_of(s.layout, position)
        costs[0 if 0 in mine else mine[-1]] += outside_blocks(s, position)
    if s.cluster.on_cpu:
        costs = [cost + _host_of_stage(s, stage, len(costs)) for stage, cost in enumerate(costs)]
    slower = rates.slowest(s.layout.ranks, s.cluster.device.spread)
    costs = [cost.slowed(slower) for cost in costs]
    if not s.software.overlap_pipeline and s.layout.pp > 1:
        wait = max(seconds for (a, b), seconds in transfers(s).items() if b == a + 1)
        costs = [cost + Cost(wait, wait, 0, wait, wait) for cost in costs]
    return costs


def outside_blocks(s: Setting, position: int) -> Cost:
    """Cost of the messages of data parallelism that a rank of a pipeline position sends in every microbatch for
    parameters outside of blocks."""
    return per_microbatch(model_states.outside_blocks(s, position), Cost(), s)


def _blocks(s: Setting, shared: Parts) -> list[Cost]:
    """Cost of the blocks of each stage. Equal stages are summed once."""
    mixed, modes = s.card.mixed, s.recompute
    kinds: dict[tuple[bool, str], Cost] = {}
    sums: dict[tuple[tuple[bool, str], ...], Cost] = {}
    costs = []
    for numbers in s.stages:
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
        send = communication.send(s.activation, False, s.cluster)
        ends += machine.overhead("stage") * s.layout.pp / stages
        ends += 2 * held(send, s.group("pp"), s.cluster)
    return Cost(0.4 * ends, 0.6 * ends)
