"""Three criteria of a layout: redundant computing, peak memory, and what is sent when.

Memory, messages and prices are those of the planner. This file adds which share of the computing is redundant.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from fivefold.models.operations import Operation
from fivefold.models.recomputation import region
from fivefold.plan.memory import model_states
from fivefold.plan.messages import volume
from fivefold.plan.messages.volume import Moment
from fivefold.plan.setting import Setting
from fivefold.plan.time import stage_costs, time
from fivefold.plan.time.cost import Cost, forward_flops, operation
from fivefold.plan.time.time import Step
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import sharing_group
from fivefold.sharding.units import syncs


@dataclass(frozen=True)
class Redundant:
    """Computing of all ranks in a step that one process would not do, in seconds per rank, by its reason.

    useful: what one process would compute, spread over the ranks. operations: of activations that several ranks have
    whole (norms, residual sums and router without sequence parallelism, the order of rows between experts). recompute:
    forward again. sums: gradients of a microbatch that several ranks add up (context parallelism; tp with sp, of
    experts). update: of states that several ranks keep.
    """

    useful: float
    operations: float = 0.0
    recompute: float = 0.0
    sums: float = 0.0
    update: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """Each reason as a share of what one process computes."""
        names = [field.name for field in fields(self)][1:]
        return {name: getattr(self, name) / self.useful for name in names}

    @property
    def share(self) -> float:
        """All of it as a share of what one process computes: 0.31 with full recomputation, for instance."""
        return sum(self.parts.values())

    def as_json(self) -> dict[str, Any]:
        return {"share": self.share, **self.parts, "seconds": asdict(self)}


def redundant(s: Setting) -> Redundant:
    """What ranks compute more than once, or more than one process would.

    An operation's work is its FLOPs, or without any the bytes that it moves. The tp x cp ranks of a microbatch do
    together tp x cp times the work of one; one process does that of a model that nothing divides. The rest is
    redundant. It is priced at the rank's own rates, so small matmuls count as slow and not as redundant. Waiting is no
    computing: the idle time of a pipeline and exposed messages are not in it. Experts are taken as evenly loaded. Of
    each sum and update, too, the elements are compared with those of one process.
    """
    found: dict[str, float] = defaultdict(float)
    even = replace(s, sizes=replace(s.sizes, load=1.0))
    undivided = replace(even.sizes, tp=1, cp=1, ep=1, sp=False, sp_regather=False, chunks=1)
    mine, one, shared = even.work, s.card.work(undivided, s.software), stage_costs.parts(even)
    for (mixed, mode), count in Counter(zip(s.card.mixed, s.recompute, strict=True)).items():
        priced = list(zip(*shared.operations[mixed], strict=True))
        _operations(found, even, priced, one.block[mixed], mode, count)
    for ops, whole in ((mine.begin, one.begin), (mine.end, one.end)):
        _operations(found, even, [(op, operation(op, even)) for op in ops], whole, "none", 1)
    _sums(found, s)
    # of the tp x cp ranks of a microbatch, on average over all ranks
    each = _microbatches(s) * s.layout.tp * s.layout.cp / s.layout.ranks
    seconds = {name: each * value for name, value in found.items()}
    kept, update = _updates(s)
    seconds["useful"] += update / kept
    return Redundant(**seconds, update=update - update / kept)


def _microbatches(s: Setting) -> float:
    """Microbatches of a step, over all data-parallel ranks."""
    return s.sequences / s.sizes.B if s.sequences else s.microbatches * s.layout.dp


def _operations(
    found: dict[str, float],
    s: Setting,
    priced: Sequence[tuple[Operation, Cost]],
    one: Sequence[Operation],
    mode: str,
    count: int,
) -> None:
    """Adds the seconds of `count` times these operations on one rank. one: those of one process."""
    again = region(mode, s.software)
    needed, done = _work_by_name(one), _work_by_name([op for op, _ in priced])
    ranks, late = s.layout.tp * s.layout.cp, stage_costs.saves_late(s.layout)
    for op, cost in priced:
        forward, backward = cost.alone
        seconds = count * (forward + backward)
        useful = min(1.0, needed[op.name] / (ranks * done[op.name])) if done[op.name] else 0.0
        found["useful"] += useful * seconds
        found["operations"] += (1 - useful) * seconds
        found["recompute"] += count * again.repeated(op, late) * forward


def _work_by_name(ops: Sequence[Operation]) -> dict[str, float]:
    """FLOPs of the operations of each name in forward; without any, the bytes that they move in both directions."""
    found: dict[str, float] = defaultdict(float)
    for op in ops:
        found[op.name] += forward_flops(op) or op.forward + op.backward
    return found


def _sums(found: dict[str, float], s: Setting) -> None:
    """Adds the seconds in which a rank adds a microbatch's gradients to their sums."""
    mine, one = (_summed(s, layout) for layout in (s.layout, Layout()))
    seconds = sum(stage_costs.accumulate(elements, s).weight for elements in mine)
    ranks = s.layout.tp * s.layout.cp
    useful = min(1.0, sum(one) / (ranks * sum(mine)))
    found["useful"] += useful * seconds
    found["sums"] += (1 - useful) * seconds


def _summed(s: Setting, layout: Layout) -> list[float]:
    """Elements of gradients that a rank adds up, by block and of the model's end."""
    blocks, _, behind, tied = model_states.elements(s.model, layout)
    return [*(block.computes for block in blocks), behind.computes + tied.computes]


def _updates(s: Setting) -> tuple[float, float]:
    """(how often a parameter is updated in a step, on average; seconds of the updates per rank, on average)."""
    ranks = model_states.rank_elements(s)
    kept = [own.keeps if s.layout.zero else own.computes for own in ranks]
    copies = max(1.0, sum(kept) * s.layout.ranks / s.layout.pp / s.card.count)
    seconds = sum(time.update(s, own) for own in ranks) / s.layout.pp
    matrices = time.whole_matrices(replace(s, layout=Layout()), 0)  # those of the whole model, once
    return copies, seconds + copies * matrices / s.layout.ranks


def idle(s: Setting, step: Step) -> float:
    """Share of a step in which a rank waits for other stages, on average over the ranks of a pipeline. Stages that
    compute less than the busiest one wait longer."""
    if s.layout.pp == 1:
        return 0.0
    _, _, busy = stage_costs.pipeline(s, stage_costs.stage_costs(s))
    return (step.bubble + max(busy) - sum(busy) / len(busy)) / step.seconds


def moments(s: Setting) -> list[Moment]:
    """When the first rank of a pipeline's first stage sends what. Equal messages at equal moments are counted together;
    what it receives, and the few numbers on which all ranks agree, are left out."""
    times = Counter[Moment]()
    for moment in volume.moments(s):
        if moment.what != "receive" and moment.axis != "all":
            times[moment._replace(times=0)] += moment.times
    return [moment._replace(times=count) for moment, count in times.items()]


def words(moment: Moment) -> str:
    """`2 all_reduce over tp`."""
    return f"{moment.calls} {moment.what} over {'dp' if moment.axis in volume.DATA else moment.axis}"


def data_units(layout: Layout) -> tuple[float, float]:
    """What data parallelism sends per parameter, in numbers of 16 bits: (once per step, per microbatch), without the
    factor (n - 1) / n (arXiv 1910.02054, section 7). With ZeRO++ it is what a node sends to others, without the scales
    of quantised blocks."""
    across = layout.zeropp != Layout().zeropp
    once = each = 0.0
    for sync in syncs(layout):
        if across and sync.group != "across":
            continue
        part = 1.0 if across else sync.part  # every rank of a node sends its part
        part /= sharing_group(layout)[1] if sync.rows else 1
        size = part * (2 if sync.what == "sum" else 1) * (sync.blocks.bits / 16 if sync.blocks else 1)
        once, each = once + size * (not sync.each), each + size * sync.each
    return once, each
