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
from fivefold.plan.memory.memory import MicrobatchBytes, Sums
from fivefold.plan.memory.model_states import Elements
from fivefold.plan.search.space import Choice
from fivefold.plan.setting import Setting, Software, setting, stages
from fivefold.plan.time import stage_costs
from fivefold.plan.time.cost import Cost, slowest
from fivefold.plan.time.stage_costs import Parts
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import stages_of


class Share(NamedTuple):
    """A part of the model: blocks without and with experts, what comes before the blocks and what comes behind."""

    plain: float
    mixed: float
    first: float
    last: float


class Costs(NamedTuple):
    """Costs of what a `Share` counts."""

    plain: Cost
    mixed: Cost
    begin: Cost
    end: Cost

    def of(self, part: Share) -> tuple[float, float]:
        """Seconds of a part's forward and backward."""
        (plain, mixed, begin, end), (blocks, with_experts, first, last) = self, part
        forward = blocks * plain.forward + with_experts * mixed.forward
        forward = forward + first * begin.forward + last * end.forward
        backward = blocks * (plain.input + plain.weight) + with_experts * (mixed.input + mixed.weight)
        backward += first * (begin.input + begin.weight) + last * (end.input + end.weight)
        return forward, backward


@dataclass(frozen=True)
class Position:
    """The ranks of a pipeline position. part: of the model. before: that of the stages before its own. stages: blocks
    (without, with experts) of each of its own."""

    part: Share
    before: Share
    stages: tuple[tuple[int, int], ...]
    number: int = 0


class MicrobatchCost(NamedTuple):
    """Costs of one microbatch on the slowest device, and its bytes. alone: of a block without and with experts on an
    average device. slower: the slowest device beside the average."""

    costs: Costs
    alone: tuple[Cost, Cost]
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
            slowest(x.ranks, s.cluster.device.spread),
            model_states.elements(self.model, flat),
        )
        costs = {False: Cost(), True: Cost()}
        for kind in sums.block:
            costs[kind] = stage_costs.computed(s, kind, parts, x.recompute)
            costs[kind] += self._summed(s, elements.blocks[self.mixed.index(kind)].computes)
        last = parts.end + self._summed(s, elements.behind.computes + elements.tied.computes)
        alone = costs[False], costs[True]
        slowed = Costs(*(cost.slowed(slower) for cost in (*alone, parts.begin, last)))
        return MicrobatchCost(slowed, alone, slower, memory.microbatch(s, sums, x.recompute))

    def _summed(self, s: Setting, elements: float) -> Cost:
        """The cost of adding up gradients; none on this machine, where it depends on who shares them."""
        return Cost() if s.cluster.machine else stage_costs.accumulate(elements, s)

    def elements(self, layout: Layout, part: Share) -> Elements:
        """Elements of a part of the model."""
        key = (layout.tp, layout.ep, layout.sp, layout.shards, layout.zero > 0, part)
        if key not in self._elements:
            blocks, before, behind, tied = model_states.elements(self.model, layout)
            parts = [(part.first, before), (part.last, behind), (part.last * (not part.first), tied)]
            for kind, number in ((False, part.plain), (True, part.mixed)):
                parts += [(number, self._block(blocks, kind))] if number else []
            counted = (elements.times(number) for number, elements in parts if number)
            self._elements[key] = sum(counted, Elements())
        return self._elements[key]

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
        (plain, mixed), (others, with_experts) = (
            map(sum, zip((0, 0), *x, strict=True)) for x in (own, ahead)
        )
        part = Share(plain, mixed, 0 in mine, len(by_stage) - 1 in mine)
        return Position(part, Share(others, with_experts, 0 not in mine, False), own, index)

    def _kinds(self, numbers: Sequence[int]) -> tuple[int, int]:
        """The numbers of blocks without and with experts."""
        mixed = sum(self.mixed[number] for number in numbers)
        return len(numbers) - mixed, mixed

    def groups(self, layout: Layout) -> tuple[Position, ...]:
        """One pipeline rank of each kind; the last of them, which starts latest."""
        key = (layout.pp, layout.schedule, layout.virtual_stages)
        if key not in self._groups:
            last = {at.part: at for at in self.positions(layout)}
            self._groups[key] = tuple(last.values())
        return self._groups[key]

    def hops(self, c: Choice) -> tuple[list[float], list[float]]:
        """Seconds that an activation takes to each position, and a gradient on the way back."""
        x = c.layout
        key = (x.pp, x.tp, x.cp, x.sp, c.B, c.mode)
        if key not in self._hops:
            taken = stage_costs.transfers(self.setting(c)) if x.pp > 1 else {}
            there = accumulate((taken[a, a + 1] for a in range(x.pp - 1)), initial=0.0)
            back = accumulate((taken[a + 1, a] for a in range(x.pp - 1)), initial=0.0)
            self._hops[key] = list(there), list(back)
        return self._hops[key]
