"""Parts that many layouts share, computed once: costs and bytes of their operations, positions of their pipelines,
elements on a rank. A search makes its bounds from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from fivefold.models.card import card_of
from fivefold.models.section import ModelSection
from fivefold.plan.cluster.devices import Cluster
from fivefold.plan.memory import memory, model_states
from fivefold.plan.memory.memory import MicrobatchBytes
from fivefold.plan.memory.model_states import Elements
from fivefold.plan.memory.operations import Sums
from fivefold.plan.search.space import Choice
from fivefold.plan.setting import Setting, setting, stages
from fivefold.plan.software import Software
from fivefold.plan.time import pipeline, rates, stage_costs, sync_costs
from fivefold.plan.time.cost import Cost
from fivefold.plan.time.stage_costs import Parts
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import stages_of


@dataclass(frozen=True)
class Position:
    """The part of the model on the ranks of a pipeline position.

    plain, mixed: blocks without and with experts. first, last: whether it has the first and the last stage. before:
    blocks (without, with) of the stages before its own. stages: the same of each of its own.
    """

    plain: int
    mixed: int
    first: bool
    last: bool
    before: tuple[int, int]
    stages: tuple[tuple[int, int], ...]
    number: int = 0


class MicrobatchCost(NamedTuple):
    """Costs of one microbatch on the slowest device, and its bytes. plain, mixed: a block without and with experts;
    alone: these on an average device. begin, end: what comes before the blocks and behind them. slower: the slowest
    device beside the average."""

    plain: Cost
    mixed: Cost
    alone: tuple[Cost, Cost]
    begin: Cost
    end: Cost
    slower: float
    bytes: MicrobatchBytes


def within_block(x: Layout) -> tuple[object, ...]:
    """The fields of a layout on which the operations of a block depend."""
    return x.tp, x.cp, x.cp_method, x.ep, x.expert_chunks, x.sp, x.sp_regather


class SharedCosts:
    """The shared parts of all layouts of a model on a cluster."""

    def __init__(self, model: ModelSection, cluster: Cluster, software: Software):
        self.model, self.cluster, self.software = model, cluster, software
        self.mixed = card_of(model).mixed
        self._parts: dict[tuple[object, ...], tuple[Parts, Sums]] = {}
        self._microbatches: dict[tuple[object, ...], MicrobatchCost] = {}
        self._elements: dict[tuple[object, ...], Elements] = {}
        self._positions: dict[tuple[object, ...], tuple[Position, ...]] = {}
        self._groups: dict[tuple[object, ...], tuple[Position, ...]] = {}
        self._hops: dict[tuple[object, ...], tuple[list[float], list[float]]] = {}

    def setting(self, c: Choice) -> Setting:
        return setting(self.model, c.layout, self.cluster, c.B, c.count, c.mode, self.software, c.sequences)

    def parts(self, c: Choice) -> tuple[Parts, Sums]:
        """Seconds and bytes of a layout's operations."""
        x = c.layout
        key = (*within_block(x), c.B, c.mode)
        if key not in self._parts:
            s = self.setting(c)
            self._parts[key] = stage_costs.parts(s), memory.sums(s)
        return self._parts[key]

    def microbatch(self, c: Choice) -> MicrobatchCost:
        """Costs as in `stage_costs.stage_costs`, without the communication of ZeRO."""
        x = c.layout
        late = stage_costs.saves_late(x)
        key = (*within_block(x), x.recompute, late, c.B, c.mode, c.count == 1)
        if key not in self._microbatches:
            self._microbatches[key] = self._microbatch(c)
        return self._microbatches[key]

    def _microbatch(self, c: Choice) -> MicrobatchCost:
        x, (parts, sums) = c.layout, self.parts(c)
        flat = replace(x, dp_replicate=x.dp, dp_shard=1, zero=0) if x.zero else x
        s = self.setting(replace(c, layout=flat) if x.zero else c)
        slower, elements = (
            rates.slowest(x.ranks, s.cluster.device.spread),
            model_states.elements(self.model, flat),
        )
        costs = {False: Cost(), True: Cost()}
        for kind in sums.block:
            costs[kind] = stage_costs.computed(s, kind, parts, x.recompute)
            costs[kind] += self._summed(s, elements.blocks[self.mixed.index(kind)].computes)
        last = parts.end + self._summed(s, elements.behind.computes + elements.tied.computes)
        return MicrobatchCost(
            costs[False].slowed(slower), costs[True].slowed(slower), (costs[False], costs[True]),
            parts.begin.slowed(slower), last.slowed(slower), slower,
            memory.microbatch(s, sums, x.recompute),
        )  # fmt: skip

    def _summed(self, s: Setting, elements: float) -> Cost:
        """The cost of adding up gradients; none on this machine, where it depends on who shares them."""
        return Cost() if s.cluster.machine else sync_costs.accumulate(elements, s)

    def elements(self, layout: Layout, plain: float, mixed: float, first: float, last: float) -> Elements:
        """Elements of so many blocks, and of what comes before and behind them."""
        key = (layout.tp, layout.ep, layout.sp, layout.shards, layout.zero > 0, plain, mixed, first, last)
        if key not in self._elements:
            self._elements[key] = self._count(layout, plain, mixed, first, last)
        return self._elements[key]

    def _count(self, layout: Layout, plain: float, mixed: float, first: float, last: float) -> Elements:
        blocks, before, behind, tied = model_states.elements(self.model, layout)
        parts = [(first, before), (last, behind), (last * (not first), tied)]
        parts += [(some, self._block(blocks, kind)) for kind, some in ((False, plain), (True, mixed)) if some]
        return sum((part.times(number) for number, part in parts if number), Elements())

    def _block(self, blocks: Sequence[Elements], kind: bool) -> Elements:
        """A block of a kind, with as much frozen as any of them has, so that a bound stays one."""
        alike = [block for mixed, block in zip(self.mixed, blocks, strict=True) if mixed == kind]
        a, b, c, d = (max(sizes) for sizes in zip(*(block.frozen for block in alike), strict=True))
        return alike[0]._replace(frozen=(a, b, c, d))

    def positions(self, layout: Layout) -> tuple[Position, ...]:
        """The positions of a pipeline."""
        key = (layout.pp, layout.schedule, layout.virtual_stages)
        if key not in self._positions:
            self._positions[key] = tuple(self._position(layout, index) for index in range(layout.pp))
        return self._positions[key]

    def _position(self, layout: Layout, index: int) -> Position:
        by_stage, mine = stages(self.model, layout, self.software.partition), stages_of(layout, index)
        own = tuple(self._kinds(by_stage[stage]) for stage in mine)
        ahead = [self._kinds(by_stage[stage]) for stage in range(mine[0])]
        return Position(
            sum(plain for plain, _ in own), sum(mixed for _, mixed in own),
            0 in mine, len(by_stage) - 1 in mine,
            (sum(plain for plain, _ in ahead), sum(mixed for _, mixed in ahead)), own, index,
        )  # fmt: skip

    def _kinds(self, numbers: Sequence[int]) -> tuple[int, int]:
        """The numbers of blocks without and with experts."""
        mixed = sum(self.mixed[number] for number in numbers)
        return len(numbers) - mixed, mixed

    def groups(self, layout: Layout) -> tuple[Position, ...]:
        """One pipeline rank of each kind; the last of them, which starts latest."""
        key = (layout.pp, layout.schedule, layout.virtual_stages)
        if key not in self._groups:
            last = {(at.plain, at.mixed, at.first, at.last): at for at in self.positions(layout)}
            self._groups[key] = tuple(last.values())
        return self._groups[key]

    def hops(self, c: Choice) -> tuple[list[float], list[float]]:
        """Seconds that an activation takes to each position, and a gradient on the way back."""
        x = c.layout
        key = (x.pp, x.tp, x.cp, x.sp, c.B, c.mode)
        if key not in self._hops:
            taken = pipeline.transfers(self.setting(c)) if x.pp > 1 else {}
            there = accumulate((taken[a, a + 1] for a in range(x.pp - 1)), initial=0.0)
            back = accumulate((taken[a + 1, a] for a in range(x.pp - 1)), initial=0.0)
            self._hops[key] = list(there), list(back)
        return self._hops[key]
