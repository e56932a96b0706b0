"""What many layouts share, computed once: the costs of their operations, the positions of their pipelines, the elements
on a rank. The bounds of a search are made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from fivefold.layout import Layout
from fivefold.plan import memory, operations, rates, time
from fivefold.plan.clusters import Cluster
from fivefold.plan.cost import Cost, Setting
from fivefold.plan.memory import Elements
from fivefold.plan.operations import Work
from fivefold.plan.predict import setting
from fivefold.plan.software import Software
from fivefold.plan.space import Choice
from fivefold.plan.time import Parts
from fivefold.recipe.schema import ModelSection
from fivefold.sharding import stages_of


@dataclass(frozen=True)
class Position:
    """What the ranks of a position in the pipeline have: blocks without experts and with, the first stage, the last.
    before: blocks (without, with) of the stages before its own. stages: of each of its own. number: of the position."""

    plain: int
    mixed: int
    first: bool
    last: bool
    before: tuple[int, int]
    stages: tuple[tuple[int, int], ...]
    number: int = 0


@dataclass(frozen=True)
class Piece:
    """Costs of one microbatch on the slowest device, and the bytes that it keeps. plain, mixed: a block without and
    with experts; alone: these on an average device. begin, end: what comes before the blocks and behind them. slower:
    the slowest device beside the average. inside, loss: what the backward of a block and of the loss holds besides.
    sent: what is on its way between stages."""

    plain: Cost
    mixed: Cost
    alone: tuple[Cost, Cost]
    begin: Cost
    end: Cost
    slower: float
    kept_plain: float
    kept_mixed: float
    kept_begin: float
    kept_end: float
    inside: float
    loss: float
    sent: float


class Pieces:
    """Of a model on a cluster, for all layouts of a search."""

    def __init__(self, model: ModelSection, cluster: Cluster, software: Software):
        self.model, self.cluster, self.software = model, cluster, software
        self.mixed = [operations.is_mixed(model, number) for number in range(model.layers)]
        self._parts: dict[tuple[object, ...], tuple[Parts, Work]] = {}
        self._pieces: dict[tuple[object, ...], Piece] = {}
        self._elements: dict[tuple[object, ...], Elements] = {}
        self._positions: dict[tuple[object, ...], tuple[Position, ...]] = {}
        self._groups: dict[tuple[object, ...], tuple[Position, ...]] = {}
        self._hops: dict[tuple[object, ...], tuple[list[float], list[float]]] = {}

    def setting(self, c: Choice) -> Setting:
        return setting(self.model, c.layout, self.cluster, c.B, c.count, c.dtype, self.software)

    def parts(self, c: Choice) -> tuple[Parts, Work]:
        """What its operations take, and the operations."""
        x = c.layout
        key = (x.tp, x.cp, x.cp_method, x.ep, x.sp, c.B, c.dtype)
        if key not in self._parts:
            s = self.setting(c)
            work = operations.work(s.sizes, self.software)
            self._parts[key] = time.parts(s, work), work
        return self._parts[key]

    def piece(self, c: Choice) -> Piece:
        """As `time.stage_costs` has it, without what ZeRO sends."""
        x = c.layout
        key = (x.tp, x.cp, x.cp_method, x.ep, x.sp, x.recompute, c.B, c.dtype, c.count == 1)
        if key not in self._pieces:
            self._pieces[key] = self._piece(c)
        return self._pieces[key]

    def _piece(self, c: Choice) -> Piece:
        x, (parts, work) = c.layout, self.parts(c)
        flat = replace(x, dp_replicate=x.dp, dp_shard=1, zero=0)
        s = self.setting(replace(c, layout=flat))
        slower, counted = rates.slowest(x.ranks, s.cluster.device.spread), memory.elements(self.model, flat)
        costs, kept = {False: Cost(), True: Cost()}, {False: 0.0, True: 0.0}
        for kind, block in work.block.items():
            costs[kind] = time.computed(s, kind, parts)
            costs[kind] += self._summed(s, counted[0][self.mixed.index(kind)].computes)
            kept[kind] = operations.kept(block, x.recompute, self.software)
        last = parts.end + self._summed(s, counted[2].computes + counted[3].computes)
        return Piece(
            costs[False].slowed(slower), costs[True].slowed(slower), (costs[False], costs[True]),
            parts.begin.slowed(slower), last.slowed(slower), slower,
            kept[False], kept[True],
            operations.kept(work.begin, x.recompute, self.software),
            operations.kept(work.end, "none", self.software),
            *self._besides(s, work),
        )  # fmt: skip

    def _summed(self, s: Setting, elements: float) -> Cost:
        """Adding up gradients; not on the machine at hand, where it depends on who shares them."""
        return Cost() if s.cluster.machine else time.accumulate(elements, s)

    def _besides(self, s: Setting, work: Work) -> tuple[float, float, float]:
        """As `memory.activations` has it."""
        block = work.block[self.mixed[-1]]
        one = s.sizes.n * self.model.dim * s.sizes.e
        again = operations.kept(block, "none", self.software)
        again -= operations.kept(block, s.layout.recompute, self.software)
        return max(op.workspace for op in block) + one + again, max(op.workspace for op in work.end), 4 * one

    def elements(self, layout: Layout, plain: float, mixed: float, first: float, last: float) -> Elements:
        """Of so many blocks, and of what comes before and behind them."""
        shards = layout.dp_shard * layout.cp if layout.zero else 1
        key = (layout.tp, layout.ep, shards, layout.zero > 0, plain, mixed, first, last)
        if key not in self._elements:
            self._elements[key] = self._count(layout, plain, mixed, first, last)
        return self._elements[key]

    def _count(self, layout: Layout, plain: float, mixed: float, first: float, last: float) -> Elements:
        blocks, before, behind, tied = memory.elements(self.model, layout)
        parts = [(first, before)] * (first > 0) + [(last, behind)] * (last > 0)
        parts += [(last, tied)] * (last > 0 and not first)
        parts += [(plain, blocks[0])] + [(mixed, blocks[-1])] * (mixed > 0)
        sums = [
            sum(n * getattr(part, name) for n, part in parts)
            for name in ("computes", "keeps", "experts", "experts_keep")
        ]
        return Elements(sums[0], sums[1], max(part.largest for _, part in parts), sums[2], sums[3])

    def positions(self, layout: Layout) -> tuple[Position, ...]:
        """The positions of a pipeline."""
        key = (layout.pp, layout.schedule, layout.virtual_stages)
        if key not in self._positions:
            self._positions[key] = tuple(self._position(layout, index) for index in range(layout.pp))
        return self._positions[key]

    def _position(self, layout: Layout, index: int) -> Position:
        by_stage, mine = memory.stages(self.model, layout, self.software.partition), stages_of(layout, index)
        stages = tuple(self._kinds(by_stage[stage]) for stage in mine)
        ahead = [self._kinds(by_stage[stage]) for stage in range(mine[0])]
        return Position(
            sum(plain for plain, _ in stages), sum(mixed for _, mixed in stages),
            0 in mine, len(by_stage) - 1 in mine,
            (sum(plain for plain, _ in ahead), sum(mixed for _, mixed in ahead)), stages, index,
        )  # fmt: skip

    def _kinds(self, numbers: Sequence[int]) -> tuple[int, int]:
        """Blocks without experts and with."""
        mixed = sum(self.mixed[number] for number in numbers)
        return len(numbers) - mixed, mixed

    def groups(self, layout: Layout) -> tuple[Position, ...]:
        """Of positions with as many blocks each the last, which has most before it."""
        key = (layout.pp, layout.schedule, layout.virtual_stages)
        if key not in self._groups:
            last = {(at.plain, at.mixed, at.first, at.last): at for at in self.positions(layout)}
            self._groups[key] = tuple(last.values())
        return self._groups[key]

    def hops(self, c: Choice) -> tuple[list[float], list[float]]:
        """Seconds of an activation on its way to each position, and of a gradient on its way back."""
        x = c.layout
        key = (x.pp, x.tp, x.cp, x.sp, c.B, c.dtype)
        if key not in self._hops:
            taken = time.transfers(self.setting(c)) if x.pp > 1 else {}
            there = accumulate((taken[a, a + 1] for a in range(x.pp - 1)), initial=0.0)
            back = accumulate((taken[a + 1, a] for a in range(x.pp - 1)), initial=0.0)
            self._hops[key] = list(there), list(back)
        return self._hops[key]
