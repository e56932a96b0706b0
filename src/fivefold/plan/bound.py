"""What a layout takes at least, found in microseconds: lower bounds of the prediction, with which a search leaves out
what cannot win without pricing it. Nothing here may exceed what `predict.price` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fivefold.layout import Layout
from fivefold.plan import memory, operations, rates, time
from fivefold.plan.clusters import Cluster
from fivefold.plan.memory import Elements
from fivefold.plan.operations import Operation
from fivefold.plan.predict import setting
from fivefold.plan.software import Software
from fivefold.plan.space import Choice, Space
from fivefold.plan.time import Cost, Setting
from fivefold.recipe.schema import ModelSection
from fivefold.schedules.pipeline.one_f_one_b import split_into_rounds
from fivefold.sharding import stages_of

COMBINED = ("1f1b", "gpipe", "interleaved", "looped_bfs")
"""Schedules whose backward is one action: a rank's last one is followed by those of all stages before it."""
ROUNDING = 1 - 1e-9


@dataclass(frozen=True)
class Position:
    """What the ranks of a position in the pipeline have: blocks without experts and with, the first stage, the last.
    stages: blocks (without, with) of each of its stages. before: of those before its own."""

    plain: int
    mixed: int
    first: bool
    last: bool
    before: tuple[int, int]
    stages: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Piece:
    """Costs of one microbatch on the slowest device, and the bytes that it keeps. plain, mixed: a block without and
    with experts. begin, end: what comes before the blocks and behind them. inside, loss: what the backward of a block
    and of the loss holds besides. sent: what is on its way between stages."""

    plain: Cost
    mixed: Cost
    begin: Cost
    end: Cost
    kept_plain: float
    kept_mixed: float
    kept_begin: float
    kept_end: float
    inside: float
    loss: float
    sent: float

    def seconds(self, at: Position) -> float:
        """Of a position's own stages."""
        blocks = at.plain * self.plain.seconds + at.mixed * self.mixed.seconds
        return blocks + at.first * self.begin.seconds + at.last * self.end.seconds


class Bounds:
    """Seconds and bytes that layouts of a model on a cluster take at least. What many share is computed once."""

    def __init__(self, model: ModelSection, cluster: Cluster, software: Software):
        self.model, self.cluster, self.software = model, cluster, software
        self.bare = replace(software, overlap_data=False)
        self.mixed = [operations.is_mixed(model, number) for number in range(model.layers)]
        self._starts: dict[Space, list[tuple[float, float, Choice]]] = {}
        self._fewest: dict[tuple[int, int], tuple[Position, int]] = {}
        self._own: dict[tuple[object, ...], Elements] = {}
        self._pieces: dict[tuple[object, ...], Piece] = {}
        self._kept: dict[tuple[object, ...], list[tuple[Position, float]]] = {}
        self._states: dict[tuple[object, ...], float] = {}
        self._sums: dict[tuple[object, ...], tuple[float, float, float]] = {}
        self._places: dict[tuple[object, ...], tuple[Position, ...]] = {}

    def starts(self, space: Space) -> list[tuple[float, float, Choice]]:
        """Shapes with their microbatch, recomputation and dtype; the seconds and bytes that each takes at least."""
        if space not in self._starts:
            self._starts[space] = [(self.shape(c), self.shape_bytes(c, space), c) for c in space.starts()]
        return self._starts[space]

    def setting(self, c: Choice) -> Setting:
        return setting(self.model, c.layout, self.cluster, c.B, c.count, c.dtype, self.software)

    def shape(self, c: Choice) -> float:
        """Seconds, whatever the schedule and whoever shares states: all work evenly divided, or in whole blocks."""
        piece, p, layers = self.piece(c), c.layout.pp, self.model.layers
        plain = self.mixed.count(False)
        kinds = [cost for cost, some in ((piece.plain, plain), (piece.mixed, layers - plain)) if some]
        work = plain * piece.plain.seconds + (layers - plain) * piece.mixed.seconds
        even = c.count * (work + piece.begin.seconds + piece.end.seconds) / p
        even += (p - 1) / 2 * min(cost.forward for cost in kinds)  # until its ranks start, on average
        whole = c.count * -(-layers // p) * min(cost.seconds for cost in kinds)
        return (max(even, whole) + self.software.step) * ROUNDING

    def schedule(self, c: Choice) -> float:
        """Seconds until a schedule is done: the work of a position; before it the forward of the stages ahead, and
        behind it their backward."""
        piece, longest = self.piece(c), 0.0
        combined = c.layout.schedule in COMBINED
        for at in self.positions(c.layout):
            ahead = 0.0
            if not at.first:
                costs = ((at.before[0], piece.plain), (at.before[1], piece.mixed), (1, piece.begin))
                ahead = sum(n * (cost.seconds if combined else cost.forward) for n, cost in costs)
            longest = max(longest, c.count * piece.seconds(at) + ahead)
        return longest * ROUNDING

    def sharing(self, c: Choice, scheduled: float) -> float:
        """Seconds of a layout whose schedule takes `scheduled`: with what is sent of weights and gradients."""
        layout, positions = c.layout, self.positions(c.layout)
        least = min(at.plain for at in positions), min(at.mixed for at in positions)
        reduced, gathered, updated = self._sent(c, least)
        if self.software.overlap_data:
            forward, backward = self._beside(c)
            blocks = max(1, self.model.layers // layout.pp)
            reduced = time.unhidden(reduced, backward, blocks)
            gathered = time.unhidden(gathered, forward, blocks)
        within = self._within(c, least) if layout.zero > 1 else 0.0
        return scheduled + (within + reduced + gathered + updated + self.software.step) * ROUNDING

    def step(self, c: Choice) -> float:
        """Seconds as `time.step` has them, with a bound in place of the simulated pipeline."""
        return time.step(self.setting(c), run=least).seconds * ROUNDING

    def bytes(self, c: Choice, buffers: bool = True) -> float:
        """On the ranks that seem to hold most: states, what live microbatches keep, and what is there besides. Without
        buffers: what no other sharing of states goes below, if this is the one that keeps least."""
        return ROUNDING * max(kept + self._held(c, at, buffers) for at, kept in self._fullest(c))

    def _fullest(self, c: Choice) -> list[tuple[Position, float]]:
        """The positions with most blocks times live microbatches, and with most blocks; what they keep for backward,
        and during it."""
        x = c.layout
        key = (x.tp, x.cp, x.cp_method, x.ep, x.sp, x.recompute, c.B, c.dtype, c.count)
        key += (x.pp, x.schedule, x.virtual_stages)
        if key not in self._kept:
            positions = self.positions(x)
            live = [_live(c, number, len(at.stages)) for number, at in enumerate(positions)]
            chosen = {
                0,
                max(range(x.pp), key=lambda n: _live_blocks(live[n], positions[n])),
                max(range(x.pp), key=lambda n: positions[n].plain + positions[n].mixed),
            }
            self._kept[key] = [(positions[n], self._keeps(c, positions[n], live[n])) for n in chosen]
        return self._kept[key]

    def _keeps(self, c: Choice, at: Position, live: Sequence[int]) -> float:
        """live: microbatches in each stage of the position."""
        piece, kept = self.piece(c), 0.0
        for number, (plain, mixed) in enumerate(at.stages):
            size = plain * piece.kept_plain + mixed * piece.kept_mixed
            size += at.first * (number == 0) * piece.kept_begin
            kept += live[number] * (size + at.last * (number == len(at.stages) - 1) * piece.kept_end)
        besides = max(piece.inside, piece.loss) if at.last else piece.inside
        return kept + besides + piece.sent * (c.layout.pp > 1)

    def _held(self, c: Choice, at: Position, buffers: bool) -> float:
        """States of a position, and buffers."""
        x = c.layout
        key = (x.tp, x.ep, x.pp > 1, x.zero, x.dp_shard * x.cp, at, c.dtype, c.count == 1, buffers)
        if key not in self._states:
            own, b = self._elements(x, at), self.software.states[c.dtype]
            held = sum(memory.state_bytes(b, x.zero, own.computes, own.keeps, c.count, x.pp > 1))
            self._states[key] = held + (memory.buffers(self.model, x, own, b) if buffers else 0.0)
        return self._states[key]

    def shape_bytes(self, c: Choice, space: Space) -> float:
        """On the first ranks, whatever the schedule, where states are shared as far as can be."""
        piece, lean = self.piece(c), space.leanest(c.layout)
        fewest, blocks = self._first_ranks(c, space)
        own = self._elements(lean, fewest)
        held = sum(
            memory.state_bytes(self.software.states[c.dtype], lean.zero, own.computes, own.keeps, c.count)
        )
        kept = [k for k, some in ((piece.kept_plain, fewest.plain), (piece.kept_mixed, fewest.mixed)) if some]
        return (held + piece.inside + blocks * min(kept, default=0.0)) * ROUNDING

    def _first_ranks(self, c: Choice, space: Space) -> tuple[Position, int]:
        """The fewest blocks that they have under any schedule, and the fewest times microbatches that are live."""
        key = (c.layout.pp, c.count)
        if key not in self._fewest:
            found = []
            for name, virtual in space.schedules(c.layout.pp):
                one = replace(c, layout=replace(c.layout, schedule=name, virtual_stages=virtual))
                at = self.positions(one.layout)[0]
                found.append((at, _live_blocks(_live(one, 0, len(at.stages)), at)))
            plain, mixed = min(at.plain for at, _ in found), min(at.mixed for at, _ in found)
            fewest = Position(plain, mixed, True, False, (0, 0), ())
            self._fewest[key] = fewest, min(blocks for _, blocks in found)
        return self._fewest[key]

    def _beside(self, c: Choice) -> tuple[float, float]:
        """Seconds of forward and backward of a microbatch on a rank, at most."""
        if c.layout.zero > 1 or (c.layout.pp > 1 and not self.software.overlap_pipeline):
            return 1e9, 1e9  # what it waits for comes to these, too
        piece, positions = self.piece(c), self.positions(c.layout)
        plain, mixed = max(at.plain for at in positions), max(at.mixed for at in positions)
        costs = ((plain, piece.plain), (mixed, piece.mixed), (1, piece.begin), (1, piece.end))
        return sum(n * x.forward for n, x in costs), sum(n * (x.input + x.weight) for n, x in costs)

    def _within(self, c: Choice, least: tuple[int, int]) -> float:
        """Seconds that ZeRO 2 and 3 add to so many blocks (without and with experts) of all microbatches."""
        piece, s = self.piece(c), self.setting(c)
        blocks = memory.elements(self.model, c.layout)[0]
        found = 0.0
        for kind, cost, count in ((0, piece.plain, least[0]), (1, piece.mixed, least[1])):
            if count:
                own = blocks[self.mixed.index(bool(kind))]
                found += count * time.within_step(own, cost, s).seconds
        return c.count * found

    def _sent(self, c: Choice, least: tuple[int, int]) -> tuple[float, float, float]:
        """Seconds of a rank that has so many blocks: gradients summed, weights gathered, were nothing beside them; and
        the optimizer."""
        x = c.layout
        key = (x.tp, x.cp, x.pp, x.ep, x.zero, x.dp_replicate, x.dp_shard, least, c.dtype)
        if key not in self._sums:
            own = self._elements(x, Position(*least, False, False, (0, 0), ()))
            s = replace(self.setting(c), software=self.bare)
            self._sums[key] = (*time.data_parallel(s, own, 0.0, 0.0), time.optimizer(s, own))
        return self._sums[key]

    def _elements(self, layout: Layout, at: Position) -> Elements:
        """Of a position: its blocks, and what comes before or behind them."""
        shards = layout.dp_shard * layout.cp if layout.zero else 0
        key = (layout.tp, layout.ep, shards, at)
        if key not in self._own:
            self._own[key] = self._count(layout, at)
        return self._own[key]

    def _count(self, layout: Layout, at: Position) -> Elements:
        blocks, before, behind, tied = memory.elements(self.model, layout)
        parts = [(1, before)] * at.first + [(1, behind)] * at.last
        parts += [(1, tied)] * (at.last and not at.first)
        parts += [(at.plain, blocks[0])] + [(at.mixed, blocks[-1])] * (at.mixed > 0)
        sums = [
            sum(n * getattr(part, name) for n, part in parts)
            for name in ("computes", "keeps", "experts", "experts_keep")
        ]
        return Elements(sums[0], sums[1], max(part.largest for _, part in parts), sums[2], sums[3])

    def positions(self, layout: Layout) -> tuple[Position, ...]:
        """The positions of a pipeline."""
        key = (layout.pp, layout.schedule, layout.virtual_stages)
        if key not in self._places:
            self._places[key] = tuple(self._position(layout, index) for index in range(layout.pp))
        return self._places[key]

    def _position(self, layout: Layout, index: int) -> Position:
        by_stage, mine = memory.stages(self.model, layout, self.software.partition), stages_of(layout, index)
        own = [self.mixed[number] for stage in mine for number in by_stage[stage]]
        kinds = [[self.mixed[number] for number in by_stage[stage]] for stage in mine]
        stages = tuple((kind.count(False), kind.count(True)) for kind in kinds)
        ahead = [self.mixed[number] for stage in range(mine[0]) for number in by_stage[stage]]
        return Position(
            own.count(False), own.count(True), 0 in mine, len(by_stage) - 1 in mine,
            (ahead.count(False), ahead.count(True)), stages,
        )  # fmt: skip

    def piece(self, c: Choice) -> Piece:
        x = c.layout
        key = (x.tp, x.cp, x.cp_method, x.ep, x.sp, x.recompute, c.B, c.dtype, c.count == 1)
        if key not in self._pieces:
            self._pieces[key] = self._piece(c)
        return self._pieces[key]

    def _piece(self, c: Choice) -> Piece:
        """As `time.stage_costs` has it, without what ZeRO sends."""
        x = c.layout
        flat = Layout(tp=x.tp, cp=x.cp, cp_method=x.cp_method, ep=x.ep, sp=x.sp, recompute=x.recompute)
        s = self.setting(replace(c, layout=flat))
        slower, counted = rates.slowest(x.ranks, s.cluster.device.spread), memory.elements(self.model, flat)
        costs, kept = {False: Cost(), True: Cost()}, {False: 0.0, True: 0.0}
        for kind in set(self.mixed):
            costs[kind] = time.block_cost(s, self.mixed.index(kind)).slowed(slower)
            block = operations.block(s.sizes, self.software, kind)
            kept[kind] = operations.kept(block, x.recompute, self.software)
        begin, end = operations.begin(s.sizes, self.software), operations.end(s.sizes, self.software)
        last = time.end_cost(s) + time.accumulate(counted[2].computes + counted[3].computes, s)
        return Piece(
            costs[False], costs[True], time.part(begin, s).slowed(slower), last.slowed(slower),
            kept[False], kept[True],
            operations.kept(begin, x.recompute, self.software), operations.kept(end, "none", self.software),
            *self._besides(s, end),
        )  # fmt: skip

    def _besides(self, s: Setting, end: list[Operation]) -> tuple[float, float, float]:
        """As `memory.activations` has it."""
        block = operations.block(s.sizes, self.software, self.mixed[-1])
        one = s.sizes.n * self.model.dim * s.sizes.e
        again = operations.kept(block, "none", self.software)
        again -= operations.kept(block, s.layout.recompute, self.software)
        return max(op.workspace for op in block) + one + again, max(op.workspace for op in end), 4 * one


def _live_blocks(live: Sequence[int], at: Position) -> int:
    return sum(count * sum(kinds) for count, kinds in zip(live, at.stages, strict=True))


def _live(c: Choice, rank: int, stages: int) -> list[int]:
    """Microbatches that each stage of a position in the pipeline has before the first is given up, at least: those of
    the forwards before it, as `schedules/pipeline` has them."""
    p, m, v = c.layout.pp, c.count, stages
    if p == 1:
        return [1]
    if c.layout.schedule in ("gpipe", "looped_bfs"):
        return [m] * v
    if c.layout.schedule in ("zbv", "dualpipev"):
        return [min(m, 2 * p - 1 - rank), min(m, rank + 1)]
    if c.layout.schedule == "zb_h1":
        return [min(m, p)]
    if c.layout.schedule != "interleaved":
        return [min(m, p - rank)]
    rounds = split_into_rounds(m, p)
    found, left = [0] * v, (v - 1) * rounds[0] + 2 * (p - rank - 1) + 1
    for size in rounds:
        for stage in range(v):
            found[stage] += min(size, left)
            left -= min(size, left)
        if not left:
            break
    return found


def least(s: Setting, costs: Sequence[Cost]) -> tuple[float, list[float], list[float]]:
    """In place of `time.pipeline`: when a schedule and each rank end, at the earliest."""
    ends, busy = [], []
    for position in range(s.layout.pp):
        mine = stages_of(s.layout, position)
        busy.append(s.microbatches * sum(costs[stage].seconds for stage in mine))
        ends.append(sum(cost.forward for cost in costs[: mine[0]]) + busy[-1])
        if (
            s.layout.schedule in COMBINED
        ):  # the first rank ends last: behind its own backward comes all other ranks'
            ends[0] = max(ends[0], busy[-1] + sum(cost.seconds for cost in costs[: mine[0]]))
    return max(ends), ends, busy
