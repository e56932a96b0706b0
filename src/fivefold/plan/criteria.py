"""Three criteria of a layout: redundant computing, peak memory, and what is sent when.

Memory, bytes and prices are those of the planner. This file adds what they leave open: which share of the computing is
redundant, and at which moment of a step each message is sent.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

from fivefold.models.card import card_of
from fivefold.models.operations import Operation, Sizes
from fivefold.models.recomputation import of_blocks, region
from fivefold.plan import model_states, operations, partition, pipeline, stage_costs, sync_costs, time, volume
from fivefold.plan.cost import Cost, Setting, operation
from fivefold.plan.model_states import Elements
from fivefold.plan.time import Step
from fivefold.schedules.compression import NONE
from fivefold.spread.layout import Layout
from fivefold.spread.parts import sharing_group, stages_of


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
    card, modes = card_of(s.model), of_blocks(s.layout.recompute, s.model.layers)
    found: dict[str, float] = defaultdict(float)
    even = replace(s, sizes=replace(s.sizes, load=1.0))
    mine, one = (card.work(sizes, s.software) for sizes in (even.sizes, _undivided(even)))
    shared = stage_costs.parts(even, mine)
    kinds = Counter(zip(card.mixed, modes, strict=True))
    for (mixed, mode), count in kinds.items():
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


def _undivided(s: Setting) -> Sizes:
    """The sizes of one process for the same microbatch."""
    return replace(s.sizes, tp=1, cp=1, ep=1, sp=False, sp_regather=False, chunks=1)


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
        forward = cost.forward - cost.sent_forward
        seconds = count * (forward + cost.input - cost.sent_backward + cost.weight)
        useful = min(1.0, needed[op.name] / (ranks * done[op.name])) if done[op.name] else 0.0
        found["useful"] += useful * seconds
        found["operations"] += (1 - useful) * seconds
        found["recompute"] += count * again.repeated(op, late) * forward


def _work_by_name(ops: Sequence[Operation]) -> dict[str, float]:
    """FLOPs of the operations of each name in forward; without any, the bytes that they move in both directions."""
    found: dict[str, float] = defaultdict(float)
    for op in ops:
        found[op.name] += operations.flops(op) or op.forward + op.backward
    return found


def _sums(found: dict[str, float], s: Setting) -> None:
    """Adds the seconds in which a rank adds a microbatch's gradients to their sums."""
    mine, one = (_summed(s, layout) for layout in (s.layout, Layout()))
    seconds = sum(sync_costs.accumulate(elements, s).weight for elements in mine)
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
    ranks = model_states.rank_elements(s.model, s.layout, s.software.partition)
    kept = [own.keeps if s.layout.zero else own.computes for own in ranks]
    copies = max(1.0, sum(kept) * s.layout.ranks / s.layout.pp / card_of(s.model).count)
    seconds = sum(time.update(s, own) for own in ranks) / s.layout.pp
    matrices = time.whole_matrices(replace(s, layout=Layout()), 0)  # those of the whole model, once
    return copies, seconds + copies * matrices / s.layout.ranks


def idle(s: Setting, step: Step) -> float:
    """Share of a step in which a rank waits for other stages, on average over the ranks of a pipeline. Stages that
    compute less than the busiest one wait longer."""
    if s.layout.pp == 1:
        return 0.0
    _, _, busy = pipeline.pipeline(s, stage_costs.stage_costs(s))
    return (step.bubble + max(busy) - sum(busy) / len(busy)) / step.seconds


class Moment(NamedTuple):
    """Messages of a rank at some moment of a step. calls, size: of them together at one such moment; bytes are counted
    as in `volume`. times: such moments in a step."""

    when: str
    what: str
    axis: str
    calls: int
    size: float
    times: int

    @property
    def words(self) -> str:
        """`2 all_reduce over tp`."""
        return f"{self.calls} {self.what} over {'dp' if self.axis in volume.DATA else self.axis}"


def moments(s: Setting) -> list[Moment]:
    """When the first rank of a pipeline's first stage sends what. What ranks agree on once per step is left out: a few
    numbers, and sums of shared gradients."""
    return [*_in_blocks(s), *_at_ends(s), *_between_stages(s), *_of_data(s)]


def _in_blocks(s: Setting) -> Iterator[Moment]:
    """Messages of tensor, context and expert parallelism in the blocks of the first stage."""
    card, modes = card_of(s.model), of_blocks(s.layout.recompute, s.model.layers)
    blocks = Counter((card.is_mixed(number), modes[number]) for number in _own_blocks(s))
    for (mixed, mode), count in blocks.items():
        name = "a block with experts" if mixed else "a block"
        ops = card.block_operations(s.sizes, s.software, mixed)
        yield from _both_ways(s, ops, mode, name, count * s.microbatches)


def _own_blocks(s: Setting) -> list[int]:
    by_stage = partition.stages(s.model, s.layout, s.software.partition)
    return [number for stage in stages_of(s.layout, 0) for number in by_stage[stage]]


def _at_ends(s: Setting) -> Iterator[Moment]:
    card = card_of(s.model)
    yield from _both_ways(
        s, card.begin_operations(s.sizes, s.software), "none", "the embedding", s.microbatches
    )
    if len(partition.stages(s.model, s.layout, s.software.partition)) - 1 in stages_of(s.layout, 0):
        ops = card.end_operations(s.sizes, s.software)
        yield from _both_ways(s, ops, "none", "the output layer and loss", s.microbatches)


def _both_ways(s: Setting, ops: Sequence[Operation], mode: str, name: str, times: int) -> Iterator[Moment]:
    forward = [replace(op, sent_backward=()) for op in ops]
    backward = [replace(op, sent_forward=()) for op in ops]
    once = volume.of_operations(s, forward)
    ways = {
        f"forward of {name}": once,
        f"backward of {name}": volume.of_operations(s, backward),
        f"backward of {name}, forward again": {
            key: (calls - once[key][0], size - once[key][1])
            for key, (calls, size) in volume.of_operations(s, forward, mode).items()
        },
    }
    for when, found in ways.items():
        for (what, axis), (calls, size) in found.items():
            if calls:
                yield Moment(when, what, axis, calls, size, times)


def _between_stages(s: Setting) -> Iterator[Moment]:
    """Activations to the next stage and their gradients to the one before, if another rank has it."""
    if s.layout.pp == 1:
        return
    rank_of = partition.schedule(s.layout.schedule, s.layout.pp, 1, s.layout.virtual_stages).rank_of
    size, mine = s.sizes.n * s.model.dim * s.sizes.e, stages_of(s.layout, 0)
    for when, step in (("behind the forward of a stage", 1), ("behind the backward of a stage", -1)):
        others = [
            stage + step for stage in mine if 0 <= stage + step < len(rank_of) and rank_of[stage + step]
        ]
        if others:
            yield Moment(when, "send", "pp", 1, size, len(others) * s.microbatches)


def _of_data(s: Setting) -> Iterator[Moment]:
    """Messages of data parallelism: of a block in every microbatch, or of all parameters once per step."""
    blocks = model_states.elements(s.model, s.layout)[0]
    mine = _own_blocks(s)
    stages = len(partition.stages(s.model, s.layout, s.software.partition))
    rest = model_states.outside_blocks(s.model, s.layout, stages_of(s.layout, 0), stages)
    total = sum((blocks[number] for number in mine), rest)
    for own, name, count in ((blocks[mine[0]], "a block", len(mine)), (rest, "the rest of the model", 1)):
        for what, group, each, size in _synced(s, own):
            ways = ("forward", "backward")[-each:] if each else ()
            for way in ways:
                yield Moment(f"{way} of {name}", what, group, 1, size, count * s.microbatches)
    for what, group, each, size in _synced(s, total):
        if not each:
            units = sync_costs.summed_pieces(s, total) if what == "all_reduce" else len(mine) + 1
            when = "first forward, ahead of each block" if what == "all_gather" else "last backward"
            yield Moment(when, what, group, units, size, 1)


def _synced(s: Setting, own: Elements) -> Iterator[tuple[str, str, int, float]]:
    """(operation, group, times per microbatch, bytes) of data parallelism for these elements of a rank."""
    names = volume.COLLECTIVES | {"scatter": s.software.scatter}
    for computes, keeps, expert in own.groups():
        if s.layout.compress != NONE:
            yield from ((what, axis, 0, size * computes) for what, axis, size in volume.compressed(s, expert))
            continue
        for sync, size in volume.synced(s, keeps * sharing_group(s.layout, expert)[1], expert):
            if size and s.group(sync.group).ranks > 1:
                yield names[sync.what], sync.group, sync.each, size
