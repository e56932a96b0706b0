"""What the layouts of a search share, computed once: costs and bytes of their operations, positions of their pipelines,
elements on a rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from fivefold.models.card import card_of
from fivefold.models.section import ModelSection
from fivefold.sharding.layout import Layout, changed
from fivefold.sharding.parts import ends_of, stages_of
from fivefold_plan.cluster.devices import Cluster
from fivefold_plan.memory import memory, model_states
from fivefold_plan.memory.memory import MicrobatchBytes, Sums
from fivefold_plan.memory.model_states import Elements
from fivefold_plan.search.space import Choice
from fivefold_plan.setting import Setting, Software, setting, stages
from fivefold_plan.time import stage_costs
from fivefold_plan.time.cost import Cost, slowest
from fivefold_plan.time.stage_costs import Parts

Key = tuple[object, ...]
MANY = 2**36
"""Sequences of a microbatch so large that a sequence takes less in no other: operations take a fixed time and one that
grows with their size, and matmuls whole tiles."""

REMEMBERED = 1024  # operations of so many layouts at a time: all of them would take most of a search's memory


class Share(NamedTuple):
    """A part of the model: blocks of the first and of the second kind (`Card.second`), what comes before the blocks and
    what comes behind."""

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
        (plain, mixed, begin, end), (blocks, others, first, last) = self, part
        forward = blocks * plain.forward + others * mixed.forward
        forward = forward + first * begin.forward + last * end.forward
        backward = blocks * (plain.input + plain.weight) + others * (mixed.input + mixed.weight)
        backward += first * (begin.input + begin.weight) + last * (end.input + end.weight)
        return forward, backward

    def hidden(self, part: Share) -> float:
        """The most seconds of a part's microbatch that pairs hide, of waits for experts' rows. The parts of a whole
        hide no more together than the whole does."""
        (forward, backward), (plain, mixed) = self.of(part), self[:2]
        there = part.plain * plain.rows_forward + part.mixed * mixed.rows_forward
        back = part.plain * plain.rows_backward + part.mixed * mixed.rows_backward
        return min(there, backward - back) + min(back, forward - there)


@dataclass(frozen=True)
class Position:
    """The ranks of a pipeline position. part: of the model. before: that of the stages before its own. stages: blocks
    (of the first, of the second kind) of each of its own."""

    part: Share
    before: Share
    stages: tuple[tuple[int, int], ...]
    number: int = 0


class MicrobatchCost(NamedTuple):
    """Costs of one microbatch on the slowest device. alone: of a block of each kind on an average device.
    slower: the slowest device beside the average."""

    costs: Costs
    alone: tuple[Cost, Cost]
    slower: float


class Operations:
    """What layouts share that compute the same operations: their seconds and their bytes, found when asked for."""

    def __init__(self, s: Setting):
        self.setting = s

    @cached_property
    def parts(self) -> Parts:
        return stage_costs.parts(self.setting)

    @cached_property
    def sums(self) -> Sums:
        return memory.sums(self.setting)


def within_block(x: Layout) -> Key:
    """The fields of a layout on which the operations of a block depend."""
    experts = x.ep, x.ep_fold, x.expert_chunks, x.expert_buffer
    return x.tp, x.cp, x.cp_method, *experts, x.sp, x.sp_regather, x.tp_chunks


class SharedCosts:
    """The shared parts of all layouts of a model on a cluster."""

    def __init__(self, model: ModelSection, cluster: Cluster, software: Software):
        self.model, self.cluster, self.software = model, cluster, software
        self._many = replace(software, batch_first=False)  # a microbatch of one sequence copies least
        self.second = card_of(model).second
        mixed = self.second.count(True)
        self.whole = Share(len(self.second) - mixed, mixed, 1, 1)
        # no price grows with its size alone; of windows, only several sequences copy keys. Where documents are not
        # known, attention has the price of whole sequences, which does
        sample = software.documents and software.documents.sample
        self.exact = bool(cluster.machine or sample or card_of(model).narrow)
        self._operations: dict[Key, Operations] = {}
        self._microbatches: dict[Key, MicrobatchCost] = {}
        self._bytes: dict[Key, MicrobatchBytes] = {}
        self._elements: dict[Key, Elements] = {}
        self._positions: dict[Key, tuple[Position, ...]] = {}
        self._groups: dict[Key, tuple[Position, ...]] = {}
        self._hops: dict[Key, tuple[list[float], list[float]]] = {}

    def setting(self, c: Choice) -> Setting:
        software = self._many if c.B == MANY else self.software
        return setting(self.model, c.layout, self.cluster, c.B, c.count, c.mode, software, c.sequences)

    def operations(self, c: Choice) -> Operations:
        """Seconds and bytes of a layout's operations."""
        s = self.setting(c)
        key = (*within_block(c.layout), c.layout.splits_backward, c.B, c.mode, s.rounded_once)
        if key not in self._operations:
            if len(self._operations) == REMEMBERED:
                del self._operations[next(iter(self._operations))]
            self._operations[key] = Operations(s)
        return self._operations[key]

    def microbatch(self, c: Choice) -> MicrobatchCost:
        """Costs as in `stage_costs.stage_costs`, without what ZeRO adds: communication, and weights that every
        matmul rounds."""
        x = c.layout
        key = (*within_block(x), x.recompute, x.splits_backward, c.B, c.mode, c.count == 1)
        if key not in self._microbatches:
            one = undivided(c)
            parts, s = self.operations(one).parts, self.setting(one)
            elements = model_states.elements(self.model, one.layout)
            costs = {False: Cost(), True: Cost()}
            for kind in set(self.second):
                costs[kind] = stage_costs.computed(s, kind, parts, x.recompute)
                costs[kind] += self._summed(s, elements.blocks[self.second.index(kind)].computes)
            last = parts.end + self._summed(s, elements.behind.computes + elements.tied.computes)
            alone, slower = (costs[False], costs[True]), slowest(x.ranks, s.cluster.device.spread)
            slowed = Costs(*(cost.slowed(slower) for cost in (*alone, parts.begin, last)))
            self._microbatches[key] = MicrobatchCost(slowed, alone, slower)
        return self._microbatches[key]

    def bytes(self, c: Choice) -> MicrobatchBytes:
        """Bytes of a microbatch."""
        x = c.layout
        key = (*within_block(x), x.recompute, x.splits_backward, c.B, c.mode)
        if key not in self._bytes:
            one = undivided(c)
            self._bytes[key] = memory.microbatch(self.setting(one), self.operations(one).sums, x.recompute)
        return self._bytes[key]

    def _summed(self, s: Setting, elements: float) -> Cost:
        """The cost of adding up gradients; none on this machine, where it depends on who shares them."""
        return Cost() if s.cluster.machine else stage_costs.accumulate(elements, s)

    def elements(self, layout: Layout, part: Share) -> Elements:
        """Elements of a part of the model."""
        key = (layout.tp, layout.ep, layout.ep_fold, layout.sp, layout.shards, layout.zero > 0, part)
        if key not in self._elements:
            blocks, before, behind, tied = model_states.elements(self.model, layout)
            parts = [(part.first, before), (part.last, behind), (part.last * (not part.first), tied)]
            for kind, number in ((False, part.plain), (True, part.mixed)):
                if number:  # with as much frozen as any block of the kind has, so that a bound stays one
                    alike = [
                        block for second, block in zip(self.second, blocks, strict=True) if second == kind
                    ]
                    a, b, c, d = map(max, zip(*(block.frozen for block in alike), strict=True))
                    parts.append((number, alike[0]._replace(frozen=(a, b, c, d))))
            counted = (elements.times(number) for number, elements in parts if number)
            self._elements[key] = sum(counted, Elements())
        return self._elements[key]

    def positions(self, layout: Layout) -> tuple[Position, ...]:
        """The positions of a pipeline."""
        key = (layout.pp, layout.schedule, layout.virtual_stages, layout.bare_ends)
        if key not in self._positions:
            by_stage, positions = stages(self.model, layout, self.software.partition), []
            kinds = [(len(numbers), sum(self.second[number] for number in numbers)) for numbers in by_stage]
            blocks = [(count - second, second) for count, second in kinds]
            for index in range(layout.pp):
                held = stages_of(layout, index)
                own = tuple(blocks[stage] for stage in held)
                first, last = ends_of(layout, held)
                ahead = blocks[: min(stage % (len(blocks) // layout.copies) for stage in held)]
                (plain, mixed), (others, of_second) = (
                    map(sum, zip((0, 0), *some, strict=True)) for some in (own, ahead)
                )
                part = Share(plain, mixed, first, last)
                before = Share(others, of_second, not first, False)
                positions.append(Position(part, before, own, index))
            self._positions[key] = tuple(positions)
        return self._positions[key]

    def groups(self, layout: Layout) -> tuple[Position, ...]:
        """One pipeline rank of each kind; the last of them, which starts latest."""
        key = (layout.pp, layout.schedule, layout.virtual_stages, layout.bare_ends)
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


def undivided(c: Choice) -> Choice:
    """The choice with states that nobody shares."""
    x = c.layout
    return changed(c, layout=changed(x, dp_replicate=x.dp, dp_shard=1, zero=0)) if x.zero else c
