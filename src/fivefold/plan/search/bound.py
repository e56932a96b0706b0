"""Lower bounds of a layout's time and memory, found in microseconds. With them a search leaves out layouts that cannot
win without pricing them. No bound may exceed the prediction of `predict.price`. Parts that many layouts share are
computed once: costs and bytes of their operations, positions of their pipelines, elements on a rank."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from fivefold.models.card import card_of
from fivefold.models.section import ModelSection
from fivefold.plan.cluster.devices import Cluster
from fivefold.plan.memory import memory, model_states
from fivefold.plan.memory.memory import MicrobatchBytes, Sums
from fivefold.plan.memory.model_states import Buffers, Elements
from fivefold.plan.search.space import Choice, Space
from fivefold.plan.setting import Setting, Software, setting, stages
from fivefold.plan.time import stage_costs, time
from fivefold.plan.time.cost import Cost, slowest
from fivefold.plan.time.stage_costs import Parts
from fivefold.schedules.pipeline import SCHEDULES, ends_upwards, most_live
from fivefold.schedules.timelines import exposed_in_pieces
from fivefold.sharding.layout import Layout, changed
from fivefold.sharding.parts import ends_of, stages_of

ROUNDING = 1 - 1e-9
NONE = Buffers()
Key = tuple[object, ...]
Live = tuple[tuple[int, ...], tuple[int, ...]]
"""Microbatches in each stage of a position when it holds most: those that wait for backward; for weight gradients."""


class RankSeconds(NamedTuple):
    """Seconds of a rank: gradient sums and weight gathers, both without overlap, the optimizer, and what overlap does
    not hide of sums, gathers, and the messages of each microbatch (`stage_costs.contended`)."""

    reduced: float
    gathered: float
    updated: float
    sums: float
    gathers: float
    each: float


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

    def hidden(self, part: Share) -> float:
        """The most seconds of a part's microbatch that pairs hide, of waits for experts' rows. The parts of a whole
        hide no more together than the whole does."""
        (forward, backward), mixed = self.of(part), self.mixed
        there, back = part.mixed * mixed.rows_forward, part.mixed * mixed.rows_backward
        return min(there, backward - back) + min(back, forward - there)


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


def within_block(x: Layout) -> Key:
    """The fields of a layout on which the operations of a block depend."""
    return x.tp, x.cp, x.cp_method, x.ep, x.expert_chunks, x.expert_buffer, x.sp, x.sp_regather, x.tp_chunks


class SharedCosts:
    """The shared parts of all layouts of a model on a cluster."""

    def __init__(self, model: ModelSection, cluster: Cluster, software: Software):
        self.model, self.cluster, self.software = model, cluster, software
        self.mixed = card_of(model).mixed
        self._parts: dict[Key, tuple[Parts, Sums]] = {}
        self._microbatches: dict[Key, MicrobatchCost] = {}
        self._elements: dict[Key, Elements] = {}
        self._positions: dict[Key, tuple[Position, ...]] = {}
        self._groups: dict[Key, tuple[Position, ...]] = {}
        self._hops: dict[Key, tuple[list[float], list[float]]] = {}

    def setting(self, c: Choice) -> Setting:
        return setting(self.model, c.layout, self.cluster, c.B, c.count, c.mode, self.software, c.sequences)

    def parts(self, c: Choice) -> tuple[Parts, Sums]:
        """Seconds and bytes of a layout's operations."""
        s = self.setting(c)
        key = (*within_block(c.layout), c.B, c.mode, s.rounded_once)
        if key not in self._parts:
            self._parts[key] = stage_costs.parts(s), memory.sums(s)
        return self._parts[key]

    def microbatch(self, c: Choice) -> MicrobatchCost:
        """Costs as in `stage_costs.stage_costs`, without what ZeRO adds: communication, and weights that every
        matmul rounds."""
        x = c.layout
        key = (*within_block(x), x.recompute, x.splits_backward, c.B, c.mode, c.count == 1)
        if key not in self._microbatches:
            flat = replace(x, dp_replicate=x.dp, dp_shard=1, zero=0) if x.zero else x
            one = replace(c, layout=flat)
            (parts, sums), s = self.parts(one), self.setting(one)
            elements = model_states.elements(self.model, flat)
            costs = {False: Cost(), True: Cost()}
            for kind in set(self.mixed):
                costs[kind] = stage_costs.computed(s, kind, parts, x.recompute)
                costs[kind] += self._summed(s, elements.blocks[self.mixed.index(kind)].computes)
            last = parts.end + self._summed(s, elements.behind.computes + elements.tied.computes)
            alone, slower = (costs[False], costs[True]), slowest(x.ranks, s.cluster.device.spread)
            slowed = Costs(*(cost.slowed(slower) for cost in (*alone, parts.begin, last)))
            size = memory.microbatch(s, sums, x.recompute)
            self._microbatches[key] = MicrobatchCost(slowed, alone, slower, size)
        return self._microbatches[key]

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
                if number:  # with as much frozen as any block of the kind has, so that a bound stays one
                    alike = [block for mixed, block in zip(self.mixed, blocks, strict=True) if mixed == kind]
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
            kinds = [(len(numbers), sum(self.mixed[number] for number in numbers)) for numbers in by_stage]
            blocks = [(count - mixed, mixed) for count, mixed in kinds]  # without and with experts
            for index in range(layout.pp):
                held = stages_of(layout, index)
                own = tuple(blocks[stage] for stage in held)
                first, last = ends_of(layout, held)
                ahead = blocks[: min(stage % (len(blocks) // layout.copies) for stage in held)]
                (plain, mixed), (others, with_experts) = (
                    map(sum, zip((0, 0), *some, strict=True)) for some in (own, ahead)
                )
                part = Share(plain, mixed, first, last)
                before = Share(others, with_experts, not first, False)
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


class Bounds:
    """Lower bounds of the seconds and bytes of layouts of a model on a cluster. `shape`, `average`, `schedule` and
    `sharing` bound the seconds: each is tighter than the one before, and slower to compute."""

    def __init__(self, model: ModelSection, cluster: Cluster, software: Software):
        self.shared = SharedCosts(model, cluster, software)
        self.bytes = LeastBytes(self.shared)
        self.model, self.cluster, self.software = model, cluster, software
        self.bare = replace(software, overlap_data=False)
        self._starts: dict[Space, list[tuple[float, float, Choice]]] = {}
        self._sums: dict[Key, RankSeconds] = {}
        self._all: dict[Key, tuple[RankSeconds, ...]] = {}
        self._ways: dict[Key, tuple[float, float, bool, bool]] = {}

    def setting(self, c: Choice) -> Setting:
        return self.shared.setting(c)

    def starts(self, space: Space) -> list[tuple[float, float, Choice]]:
        """Bounds of seconds and bytes for each shape with its microbatch, recomputation and dtype."""
        if space not in self._starts:
            self._starts[space] = [
                (self.shape(c, space), self.bytes.shape(c, space), c) for c in space.starts()
            ]
        return self._starts[space]

    def shape(self, c: Choice, space: Space) -> float:
        """Seconds under any schedule and any sharing of states: all work divided evenly, or in whole blocks."""
        costs, (_, most, _, paired) = self.shared.microbatch(c).costs, self._least(c, space)
        rows = costs.mixed.rows_forward + costs.mixed.rows_backward if paired else 0.0
        blocks = {False: costs.plain.seconds, True: costs.mixed.seconds - rows}
        whole = c.count * most * min(blocks[kind] for kind in set(self.shared.mixed))
        return (max(self._even(c, space), whole) + self._fixed(c)) * ROUNDING

    def _least(self, c: Choice, space: Space) -> tuple[float, float, bool, bool]:
        """Of all schedules of a shape: the fewest blocks before an average pipeline rank; the fewest of the rank with
        most, for each microbatch that it computes; whether every rank has experts, if any has; and whether one of them
        runs pairs."""
        x = c.layout
        key = x.pp, x.tp > 1, x.cp > 1, x.ep > 1
        if key not in self._ways:
            layouts = [changed(x, **way) for way in space.schedules(x)]
            at = [(x, self.shared.positions(x)) for x in layouts]
            ahead = min(
                sum(one.before.plain + one.before.mixed for one in every) / len(every) for _, every in at
            )
            most = min(max(one.part.plain + one.part.mixed for one in every) / x.copies for x, every in at)
            experts = any(self.shared.mixed)
            everywhere = all(one.part.mixed > 0 or not experts for _, every in at for one in every)
            self._ways[key] = ahead, most, everywhere, any(SCHEDULES[x.schedule].paired for x in layouts)
        return self._ways[key]

    def _even(self, c: Choice, space: Space) -> float:
        """Seconds until an average pipeline rank is done: its part of the work, and the wait until it starts."""
        costs, p, layers = self.shared.microbatch(c).costs, c.layout.pp, self.model.layers
        mixed, (ahead, _, _, paired) = self.shared.mixed.count(True), self._least(c, space)
        whole = Share(layers - mixed, mixed, 1, 1)
        kinds = [cost for cost, number in ((costs.plain, layers - mixed), (costs.mixed, mixed)) if number]
        work = sum(costs.of(whole)) - costs.hidden(whole) * paired
        return c.count * work / p + ahead * min(cost.forward for cost in kinds)

    def average(self, c: Choice, space: Space) -> float:
        """`shape` plus the exposed gradient and weight traffic of an average pipeline rank. Traffic is linear in a
        rank's blocks and `exposed_in_pieces` is convex, so this is a lower bound (Jensen). It needs parameters on each
        pipeline rank under every schedule, and experts if the model has any."""
        p = c.layout.pp
        if self.cluster.machine or not self._least(c, space)[2]:
            return self.shape(c, space)
        mixed = self.shared.mixed.count(True) / p
        part = Share(self.model.layers / p - mixed, mixed, 1 / p, 1 / p)
        sent = self._least_sent(c, space, part, *self.shared.microbatch(c).costs.of(part))
        seconds = self._even(c, space) + sent + self._fixed(c)
        return max(seconds * ROUNDING, self.shape(c, space))

    def schedule(self, c: Choice, space: Space) -> float:
        """Seconds of a schedule under any sharing of states: the forward of the stages before a rank, its own work,
        and then their backward, or its traffic of weights and gradients."""
        ends, turned = self._ends(c, self.shared.microbatch(c).costs)
        end, at, forward, backward = max(ends, key=lambda end: end[0])
        sent = self._least_sent(c, space, at.part, forward, backward)
        return (max(end + sent, turned) + self._fixed(c)) * ROUNDING

    def sharing(self, c: Choice) -> float:
        """Seconds of a layout. Each rank's earliest end takes the place of the simulated pipeline."""
        micro = self.shared.microbatch(c)
        costs = micro.costs
        if c.layout.zero >= 2:  # with the communication of ZeRO in every microbatch
            s, blocks = self.setting(c), [Cost(), Cost()]
            elements = model_states.elements(self.model, c.layout).blocks
            for kind in set(self.shared.mixed):
                block, cost = elements[self.shared.mixed.index(kind)], micro.alone[kind]
                blocks[kind] = (cost + stage_costs.per_microbatch(block, cost, s)).slowed(micro.slower)
            costs = costs._replace(plain=blocks[False], mixed=blocks[True])
        ends, turned = self._ends(c, costs)
        longest = turned
        for end, at, forward, backward in ends:
            end = max(end, turned) if at.part.first else end
            longest = max(longest, end + self._unhidden(c, self._sent(c, at.part), forward, backward))
        return (longest + self._fixed(c)) * ROUNDING

    def _ends(self, c: Choice, costs: Costs) -> tuple[list[tuple[float, Position, float, float]], float]:
        """When positions have computed all their microbatches, at the earliest; with the position, and its forward and
        backward of one microbatch. And the earliest end of the step that is no position's: a microbatch passes all
        stages, there and back, and where the first position ends last, it ends behind the backward of all others."""
        x, ends, (there, back) = c.layout, [], self.shared.hops(c)
        experts, passing = self.shared.mixed.count(True), costs
        if x.splits_backward:
            # a microbatch does not wait for gradients of weights that the schedule computes later
            passing = Costs(*(cost._replace(weight=0.0) for cost in costs))
        turned = sum(passing.of(Share(self.model.layers - experts, experts, 1, 1)))
        upwards = x.pp == 1 or ends_upwards(x.schedule, x.pp, c.count, x.stages_per_rank)
        for at in self.shared.groups(x):
            forward, backward = costs.of(at.part)
            ahead, behind = costs.of(at.before)
            busy = forward + backward - costs.hidden(at.part) * SCHEDULES[x.schedule].paired
            # two copies of a model have half of the microbatches each, and begin at both ends
            end = ahead + there[at.number] * (x.copies == 1) + c.count // x.copies * busy
            ends.append((end, at, forward, backward))
            if upwards:
                turned = max(turned, end + behind + back[at.number])
        return ends, turned

    def _least_sent(self, c: Choice, space: Space, part: Share, forward: float, backward: float) -> float:
        """Seconds that sums, gathers and the optimizer add under any sharing of states. Of the waits of ZeRO 2 and 3
        within microbatches only what nothing hides is counted, and none in one of them, since waits hide no more of the
        sums than they take."""
        x = c.layout
        key = (x.tp, x.sp, x.cp, x.pp, x.ep, x.dp, part, c.mode)
        if key not in self._all:
            shape = replace(x, dp_replicate=x.dp, dp_shard=1, zero=0)
            layouts = space.sharings(shape)
            sums = {self._sent(changed(c, layout=layout), part) for layout in layouts}
            # those that no other one undercuts: exposed seconds grow with the seconds of messages
            self._all[key] = tuple(
                some
                for some in sums
                if not any(other != some and all(map(operator.le, other, some)) for other in sums)
            )
        others = max(0, c.count // x.copies - 1)
        return min(self._unhidden(c, sums, forward, backward) + others * sums.each for sums in self._all[key])

    def _unhidden(self, c: Choice, sums: RankSeconds, forward: float, backward: float) -> float:
        reduced, gathered = sums.reduced, sums.gathered
        if self.software.overlap_data:
            blocks = max(1, self.model.layers // c.layout.pp)
            reduced = exposed_in_pieces(reduced, sums.sums, backward, blocks)
            gathered = exposed_in_pieces(gathered, sums.gathers, forward, blocks)
        return reduced + gathered + sums.updated

    def _sent(self, c: Choice, part: Share) -> RankSeconds:
        """Seconds of a rank with this part of the model."""
        x = c.layout
        key = (x.tp, x.sp, x.cp, x.pp, x.ep, x.zero, x.dp_replicate, x.dp_shard, part, c.mode)
        if key not in self._sums:
            own = self.shared.elements(x, part)
            s = replace(self.setting(c), software=self.bare)
            alone = *stage_costs.per_step(s, own, 0.0, 0.0), time.optimizer(s, own)
            hidden = self.cluster.device.contended and self.software.overlap_data
            self._sums[key] = RankSeconds(
                *alone, *(stage_costs.contended(s, own) if hidden else (0.0, 0.0, 0.0))
            )
        return self._sums[key]

    def _fixed(self, c: Choice) -> float:
        """Other seconds of a step, without those that ZeRO adds on this machine."""
        if not self.cluster.machine:
            return self.software.step
        return time.fixed(self.setting(replace(c, layout=replace(c.layout, zero=0))))


class LeastBytes:
    """Lower bounds of the bytes of layouts of a model on a cluster."""

    def __init__(self, shared: SharedCosts):
        self.shared = shared
        self._fewest: dict[Key, tuple[Share, int]] = {}
        self._positions: dict[Key, list[tuple[Position, Live]]] = {}
        self._kept: dict[Key, list[tuple[Position, float, float]]] = {}
        self._states: dict[Key, tuple[float, float, Buffers]] = {}

    def of(self, c: Choice, buffers: bool = True) -> float:
        """Bytes of the ranks that probably hold most. Without buffers it is a bound for every way to share states, if
        this layout's is the one that keeps least."""
        x, size, most = c.layout, self.shared.microbatch(c).bytes, 0.0
        key = (*within_block(x), x.recompute, c.B, c.mode, c.count, x.pp, x.schedule, x.virtual_stages)
        if key not in self._kept:
            self._kept[key] = []  # with each position the bytes that its live microbatches keep, and one does
            for at, live in self._fullest(c):
                kept, each, held = 0.0, 0.0, stages_of(x, at.number)
                for stage, (plain, mixed), waiting, unfinished in zip(held, at.stages, *live, strict=True):
                    first, last = ends_of(x, [stage])
                    whole = plain * size.plain + mixed * size.mixed + first * size.begin + last * size.end
                    owed = plain * size.owed_plain + mixed * size.owed_mixed
                    kept, each = kept + waiting * whole + unfinished * owed, each + whole
                self._kept[key].append((at, kept, each))
        for at, kept, each in self._kept[key]:
            states, late, besides = self._held(c, at.part)
            besides, last = besides if buffers else NONE, bool(at.part.last)
            # gradients of several stages need not exist at once, nor any of them when most is live
            some = late * (len(at.stages) > 1)
            for held, active in ((states - late * (not _settles(c)), kept), (states - some, 0.0)):
                most = max(most, held + sum(memory.at_peak(size, besides, active, each, last)))
        return ROUNDING * (most + memory.transfers(size, x, c.count))

    def _fullest(self, c: Choice) -> list[tuple[Position, Live]]:
        """Three pipeline positions with their live microbatches: the first, the one with most blocks times live
        microbatches, the one with most blocks."""
        x = c.layout
        key = (x.pp, x.schedule, x.virtual_stages, c.count)
        if key not in self._positions:
            every = [(at, _live(c, at.number)) for at in self.shared.positions(x)]
            most = max(every, key=lambda one: _live_blocks(one[1], one[0]))
            blocks = max(every, key=lambda one: one[0].part.plain + one[0].part.mixed)
            self._positions[key] = [*{one[0].number: one for one in (every[0], most, blocks)}.values()]
        return self._positions[key]

    def _held(self, c: Choice, part: Share) -> tuple[float, float, Buffers]:
        """Bytes of the states of a rank with this part of the model, those of them that a pipeline does not always
        hold, and its buffers."""
        x = c.layout
        key = (x.tp, x.ep, x.sp, x.pp > 1, x.zero, x.dp_shard * x.cp, part, c.mode, c.count == 1)
        if key not in self._states:
            s = self.shared.setting(c)
            own = self.shared.elements(x, part)
            held, late = sum(model_states.rank_states(s, own)), 0.0
            if x.pp > 1:
                late, _ = model_states.adding_up(s, own)
            self._states[key] = held, late, model_states.buffers(s, bool(part.first), bool(part.last))
        return self._states[key]

    def shape(self, c: Choice, space: Space) -> float:
        """Bytes of the first ranks under any schedule, with states shared as widely as possible."""
        x, size = c.layout, self.shared.microbatch(c).bytes
        # the smallest part of the model, the fewest blocks times microbatches
        key = (x.pp, c.count, x.tp > 1, x.cp > 1, x.ep > 1)
        if key not in self._fewest:
            choices = [changed(c, layout=changed(x, **way)) for way in space.schedules(x)]
            first = [self.shared.positions(choice.layout)[0] for choice in choices]
            part = Share(min(at.part.plain for at in first), min(at.part.mixed for at in first), True, False)
            live = (_live_blocks(_live(choice, 0), at) for choice, at in zip(choices, first, strict=True))
            self._fewest[key] = part, min(live)
        part, blocks = self._fewest[key]
        key = (x.tp, x.ep, x.sp, x.pp, x.dp * x.cp, c.mode, c.count == 1, part)
        if key not in self._states:
            lean = self.shared.setting(replace(c, layout=space.leanest(x)))
            own = self.shared.elements(lean.layout, part)
            states, late = model_states.rank_states(lean, own), model_states.adding_up(lean, own)[0]
            self._states[key] = sum(states), late * (x.pp > 1), NONE
        kept = min((size.plain, size.mixed)[mixed] for mixed in set(self.shared.mixed))
        held, late, _ = self._states[key]
        live = blocks * kept + size.again + size.inside
        late *= not _settles(changed(c, layout=changed(x, virtual_stages=2)))
        return (held - late + live + memory.transfers(size, x, c.count)) * ROUNDING


def _settles(c: Choice) -> bool:
    """True if a rank holds most microbatches again and again, also when the gradients of all its stages add up: with so
    many microbatches that a pipeline, or each round of it, does the same several times. With two copies
    of the model it may be other stages that it holds then."""
    pp, rounds = c.layout.pp, c.layout.virtual_stages > 1
    if c.layout.copies > 1:
        return False
    return c.count >= 4 * pp and c.count % pp == 0 if rounds else c.count >= 2 * pp


def _live_blocks(live: Live, at: Position) -> int:
    return sum(count * sum(kinds) for count, kinds in zip(live[0], at.stages, strict=True))


def _live(c: Choice, rank: int) -> Live:
    x = c.layout
    return most_live(x.schedule, rank, x.pp, c.count, x.stages_per_rank) if x.pp > 1 else ((1,), (0,))
