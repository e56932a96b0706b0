"""Predicts the step time: the model's parts, data parallelism, and the pipeline, whose schedule the simulator runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fivefold.models.operations import Matmul
from fivefold.optim import OPTIMIZERS, rounding_traffic, update_traffic
from fivefold.plan.memory import model_states
from fivefold.plan.memory.model_states import Elements
from fivefold.plan.messages import volume
from fivefold.plan.setting import Setting
from fivefold.plan.time import offload, rates, sync_costs
from fivefold.plan.time.cost import Cost
from fivefold.plan.time.pipeline import PipelineTimer, hidden_by_pairs, pipeline
from fivefold.plan.time.stage_costs import Parts, outside_blocks, stage_costs
from fivefold.plan.time.sync_costs import compressed_sums, message_seconds, per_step, shared_sums
from fivefold.schedules.compression import NONE
from fivefold.sharding.parts import stages_of


@dataclass
class Step:
    """Seconds of one optimizer step.

    compute: seconds that the busiest rank computes, with the optimizer. exposed: exposed communication by axis. bubble:
    the rest, in which it waits for other stages. terms: (name, seconds) of each part. costs: of each pipeline stage
    for one microbatch.
    """

    seconds: float
    compute: float
    exposed: dict[str, float]
    bubble: float
    terms: list[tuple[str, float]] = field(default_factory=list)
    costs: Sequence[Cost] = ()


def optimizer(s: Setting, own: Elements) -> float:
    """Seconds of the norm, the update, refreshing the weights and checking them, and of what all ranks agree on."""
    return update(s, own) + agreement(s)


def agreement(s: Setting) -> float:
    """Seconds of what all ranks agree on."""
    return message_seconds(volume.control(s), s)


def on_device(s: Setting, own: Elements, position: int) -> float:
    """Seconds of the update on the device of a pipeline rank. If the host updates, only what all ranks agree on."""
    return optimizer(s, own) + whole_matrices(s, position) if offload.updates_here(s) else agreement(s)


def update(s: Setting, own: Elements) -> float:
    """Seconds of the norm, the update, refreshing the weights and checking them. The first three read and write all
    bytes of the states."""
    b = s.states
    kept = own.keeps - own.frozen[1]
    moved = update_traffic(b.gradient, b.master or b.working, b.moments, b.working)
    size = kept * (moved + rounding_traffic(b.copied))
    size *= s.software.optimizer_passes * OPTIMIZERS[s.software.optimizer].reads
    size += kept * s.software.check_traffic(s.cluster.on_cpu)
    return s.cluster.oversubscription * rates.stream(size, s.cluster.device, "optimizer", s.dtype)


def whole_matrices(s: Setting, position: int) -> float:
    """Seconds of an update's matmuls on whole matrices, and of bringing their pieces together and back."""
    messages, products = volume.matrices(s, s.layout.rank({"pp": position})), 0.0
    for (*_, r, c), flops in volume.matrix_flops(s, position):
        one = Matmul(min(r, c), min(r, c), max(r, c), weight=False)
        seconds, *_ = rates.products(one, s.cluster.device, s.rate, s.sizes.e)
        products += flops / (2 * one.m * one.n * one.k) * seconds
    return s.cluster.oversubscription * products + message_seconds(messages, s)


def step(s: Setting, run: PipelineTimer = pipeline, shared: Parts | None = None) -> Step:
    """The time of an optimizer step. run: the function that times the schedule. shared: as in `stage_costs`."""
    costs = stage_costs(s, shared)
    makespan, ends, busy = run(s, costs)
    p, m = s.layout.pp, s.microbatches
    extra, waits = 0.0, [0.0] * p
    slowest = rates.slowest(s.layout.ranks, s.cluster.device.spread)
    ranks, same, known = model_states.rank_elements(s), model_states.alike(s), {}
    reduced = gathered = updated = moved = 0.0
    for position in range(p):
        mine = [costs[stage] for stage in stages_of(s.layout, position)]
        key = same[position], tuple(mine)
        if key not in known:
            known[key] = _behind(s, ranks[position], mine, position)
        r, g, u, away = known[key]
        hidden = hidden_by_pairs(s, costs, position) if p > 1 else 0.0
        waits[position] = m * (sum(c.sent for c in mine) - hidden)
        late = ends[position] + r + g + u + away - makespan
        if late > extra:
            extra, reduced, gathered, updated, moved = late, r, g, u, away
    tensor_sums, tied_sums = max((shared_sums(s, position) for position in dict.fromkeys(same)), key=sum)
    worst = max(range(p), key=lambda position: busy[position])
    encoding = max(compressed_sums(s, own)[2] for own in ranks) if s.layout.compress != NONE else 0.0
    besides = fixed(s)
    inner = makespan + max(0.0, extra) + tensor_sums + tied_sums + besides
    apart = sync_costs.outer_seconds(s, inner) / s.sites.every
    seconds = inner + apart
    data = max(0.0, min(extra, reduced + gathered)) + tied_sums
    exposed = {"model": waits[worst] + tensor_sums, "data": data} | ({"sites": apart} if apart else {})
    if not offload.of(s).stays:
        exposed[offload.EXPOSED] = moved
    compute = busy[worst] - waits[worst] + updated + besides
    bubble = seconds - compute - sum(exposed.values())
    terms = [(f"stage {i} forward", c.forward) for i, c in enumerate(costs)]
    terms += [(f"stage {i} backward", c.input + c.weight) for i, c in enumerate(costs)]
    terms += [
        ("slowest device, part of the next", makespan * (1 - 1 / slowest)),
        ("pipeline, first start to last end", makespan),
        ("exposed gradient sums", reduced),
        ("exposed weight gathers", gathered),
        *([("encoding of gradients, part of their sums", encoding)] if s.layout.compress != NONE else []),
        ("optimizer", updated),
        *([("offload: exposed I/O", moved)] if moved else []),
        ("gradient sums over the tensor axis", tensor_sums),
        ("sum of tied embeddings", tied_sums),
        ("fixed per step", besides),
        *([("outer steps of the sites, on average", apart)] if apart else []),
    ]
    return Step(seconds, compute, exposed, max(0.0, bubble), terms, costs)


def _behind(
    s: Setting, own: Elements, mine: Sequence[Cost], position: int
) -> tuple[float, float, float, float]:
    """Seconds that gradient sums, weight gathers, the update and I/O add to a rank's step. mine: the costs of its
    stages."""
    backward, forward = sum(c.input + c.weight for c in mine), sum(c.forward for c in mine)
    forward -= outside_blocks(s, position).sent_forward
    r, g = per_step(s, own, backward, forward)
    u = on_device(s, own, position)
    return r, g, u, offload.exposed(s, offload.Computing(forward, backward, u), own)


def fixed(s: Setting) -> float:
    """Fixed seconds per step: Python between its parts."""
    machine, layout = s.cluster.machine, s.layout
    if machine is None:
        return s.software.step
    per_block = machine.overhead("block step")
    if layout.shards > 1:
        per_block += machine.overhead(f"zero{layout.zero} step")
    return s.cluster.oversubscription * (machine.overhead("step") + per_block * s.model.layers / layout.pp)
