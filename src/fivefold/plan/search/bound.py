"""Lower bounds of a layout's time and memory, found in microseconds. With them a search leaves out layouts that cannot
win without pricing them. No bound may exceed the prediction of `predict.price`."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import NamedTuple

from fivefold.models.section import ModelSection
from fivefold.plan.cluster.devices import Cluster
from fivefold.plan.memory import memory, model_states
from fivefold.plan.memory.memory import MicrobatchBytes
from fivefold.plan.memory.model_states import Buffers
from fivefold.plan.search.shared import Costs, Key, Position, Share, SharedCosts, undivided, within_block
from fivefold.plan.search.space import Choice, Space
from fivefold.plan.setting import Setting, Software
from fivefold.plan.time import stage_costs, time
from fivefold.plan.time.cost import Cost
from fivefold.plan.time.stage_costs import pipelined
from fivefold.schedules.pipeline import SCHEDULES, ends_upwards, most_live
from fivefold.schedules.timelines import exposed_in_pieces
from fivefold.sharding.layout import changed
from fivefold.sharding.parts import ends_of, stages_of

ROUNDING = 1 - 1e-9
NONE = Buffers()
Live = tuple[tuple[int, ...], tuple[int, ...]]
"""Microbatches in each stage of a position when it holds most: those that wait for backward; for weight gradients."""


class RankSeconds(NamedTuple):
    """Seconds of a rank: gradient sums and weight gathers, both without overlap, the optimizer, and what overlap does
    not hide of sums, of gathers, and of the messages of each microbatch."""

    reduced: float
    gathered: float
    updated: float
    sums: float
    gathers: float
    each: float


MANY = 2**36
"""Sequences of a microbatch so large that a sequence takes less in no other: operations take a fixed time and one that
grows with their size, and matmuls whole tiles. (Those that are measured need not.)"""
TILES = 1 - 1e-4  # the last ones of those matmuls


class Bounds:
    """Lower bounds of the seconds and bytes of layouts of a model on a cluster. `start`, `shape`, `average`,
    `schedule`, `sharing` and `simulated` bound the seconds: each is tighter than those before, and slower."""

    def __init__(self, model: ModelSection, cluster: Cluster, software: Software):
        self.shared = SharedCosts(model, cluster, software)
        self.bytes = LeastBytes(self.shared)
        self.model, self.cluster, self.software = model, cluster, software
        self._starts: dict[Space, list[tuple[float, float, Choice]]] = {}
        self._many: dict[Key, tuple[float, float, float]] = {}
        self._pipelines: dict[Key, tuple[float, dict[Share, float]]] = {}
        self._sums: dict[Key, RankSeconds] = {}
        self._all: dict[Key, tuple[RankSeconds, ...]] = {}
        self._ways: dict[Key, tuple[float, float, bool, bool]] = {}

    def setting(self, c: Choice) -> Setting:
        return self.shared.setting(c)

    def starts(self, space: Space) -> list[tuple[float, float, Choice]]:
        """`start` of each shape with its microbatch, recomputation and dtype."""
        if space not in self._starts:
            self._starts[space] = [
                (self.start(c, space), self.bytes.start(c, space), c) for c in space.starts()
            ]
        return self._starts[space]

    def start(self, c: Choice, space: Space) -> float:
        """`shape` or less: by what a sequence takes in a microbatch of `MANY`, found once for all sizes."""
        if self.shared.exact:
            return self.shape(c, space)
        x = c.layout
        key = (*within_block(x), x.recompute, x.splits_backward, x.pp, c.mode, c.count == 1)
        if key not in self._many:
            self._many[key] = self._microbatch(changed(c, B=MANY), space)
        each, ahead, most = (c.B / MANY * seconds for seconds in self._many[key])
        return self._shape(c, each, ahead, most) * TILES

    def shape(self, c: Choice, space: Space) -> float:
        """Seconds under any schedule and any sharing of states: all work divided evenly, or in whole blocks."""
        return self._shape(c, *self._microbatch(c, space))

    def _shape(self, c: Choice, each: float, ahead: float, most: float) -> float:
        return (max(c.count * each + ahead, c.count * most) + self._fixed(c)) * ROUNDING

    def _microbatch(self, c: Choice, space: Space) -> tuple[float, float, float]:
        """Seconds of a microbatch on an average pipeline rank, until this starts, and on the rank with most blocks."""
        costs, p, layers = self.shared.microbatch(c).costs, c.layout.pp, self.model.layers
        mixed, (ahead, most, _, paired) = self.shared.second.count(True), self._least(c, space)
        whole = Share(layers - mixed, mixed, 1, 1)
        kinds = [
            (cost, cost.seconds - (cost.rows_forward + cost.rows_backward) * paired) for cost in costs[:2]
        ]
        kinds = [kinds[kind] for kind in set(self.shared.second)]
        work = sum(costs.of(whole)) - costs.hidden(whole) * paired
        return (
            work / p,
            ahead * min(cost.forward for cost, _ in kinds),
            most * min(seconds for _, seconds in kinds),
        )

    def _least(self, c: Choice, space: Space) -> tuple[float, float, bool, bool]:
        """Of all schedules of a shape: the fewest blocks before an average pipeline rank; the fewest of the rank with
        most, for each microbatch that it computes; whether every rank has blocks of the second kind, if there are any;
        and whether one of them runs pairs."""
        x = c.layout
        key = x.pp, x.tp > 1, x.cp > 1, x.ep > 1
        if key not in self._ways:
            layouts = [changed(x, **way) for way in space.schedules(x)]
            at = [(x, self.shared.positions(x)) for x in layouts]
            ahead = min(
                sum(one.before.plain + one.before.mixed for one in every) / len(every) for _, every in at
            )
            most = min(max(one.part.plain + one.part.mixed for one in every) / x.copies for x, every in at)
            experts = any(self.shared.second)
            everywhere = all(one.part.mixed > 0 or not experts for _, every in at for one in every)
            self._ways[key] = ahead, most, everywhere, any(SCHEDULES[x.schedule].paired for x in layouts)
        return self._ways[key]

    def average(self, c: Choice, space: Space) -> float:
        """`shape` plus the exposed gradient and weight traffic of an average pipeline rank. Traffic is linear in a
        rank's blocks and `exposed_in_pieces` is convex, so this is a lower bound (Jensen). It needs parameters on each
        pipeline rank under every schedule, and blocks of both kinds if the model has any."""
        p = c.layout.pp
        if self.cluster.machine or not self._least(c, space)[2]:
            return self.shape(c, space)
        mixed = self.shared.second.count(True) / p
        part = Share(len(self.shared.second) / p - mixed, mixed, 1 / p, 1 / p)
        each, ahead, _ = self._microbatch(c, space)
        sent = self._least_sent(c, space, part, *self.shared.microbatch(c).costs.of(part))
        return (c.count * each + ahead + sent + self._fixed(c)) * ROUNDING

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
            for kind in set(self.shared.second):
                block, cost = elements[self.shared.second.index(kind)], micro.alone[kind]
                blocks[kind] = (cost + stage_costs.per_microbatch(block, cost, s)).slowed(micro.slower)
            costs = costs._replace(plain=blocks[False], mixed=blocks[True])
        ends, turned = self._ends(c, costs)
        longest = turned
        for end, at, forward, backward in ends:
            end = max(end, turned) if at.part.first else end
            longest = max(longest, end + self._unhidden(c, self._sent(c, at.part), forward, backward))
        return (longest + self._fixed(c)) * ROUNDING

    def simulated(self, c: Choice) -> float:
        """`sharing` with the pipeline's simulation, which layouts share that send nothing in every microbatch."""
        x = c.layout
        if x.pp == 1 or x.zero == 3 or self.cluster.machine:
            return 0.0
        key = (*within_block(x), x.recompute, c.B, c.count, c.mode, pipelined(x), x.bare_ends)
        if key not in self._pipelines:
            one = undivided(c)
            s, shared = self.setting(one), self.shared.operations(one).parts
            makespan, ends, _ = stage_costs.pipeline(s, stage_costs.stage_costs(s, shared))
            last = dict[Share, float]()
            for at in self.shared.positions(x):
                last[at.part] = max(last.get(at.part, 0.0), ends[at.number])
            self._pipelines[key] = makespan, last
        (longest, last), costs = self._pipelines[key], self.shared.microbatch(c).costs
        for part, end in last.items():
            longest = max(longest, end + self._unhidden(c, self._sent(c, part), *costs.of(part)))
        return (longest + self._fixed(c)) * ROUNDING

    def _ends(self, c: Choice, costs: Costs) -> tuple[list[tuple[float, Position, float, float]], float]:
        """When positions have computed all their microbatches, at the earliest; with the position, and its forward and
        backward of one microbatch. And the earliest end of the step that is no position's: a microbatch passes all
        stages, there and back, and where the first position ends last, it ends behind the backward of all others."""
        x, ends, (there, back) = c.layout, [], self.shared.hops(c)
        experts, passing = self.shared.second.count(True), costs
        if x.splits_backward:
            # a microbatch does not wait for gradients of weights that the schedule computes later
            passing = Costs(*(cost._replace(weight=0.0) for cost in costs))
        turned = sum(passing.of(Share(len(self.shared.mixed) - experts, experts, 1, 1)))
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
        within microbatches only what nothing hides is counted, none in one of them, since waits hide no more of the
        sums than they take, and none beside pairs, which may hide more for them."""
        x = c.layout
        key = (x.tp, x.sp, x.cp, x.pp, x.ep, x.dp, part, c.mode)
        if key not in self._all:
            layouts = space.sharings(undivided(c).layout)
            sums = {self._sent(changed(c, layout=layout), part) for layout in layouts}
            # those that no other one undercuts: exposed seconds grow with the seconds of messages
            self._all[key] = tuple(
                some
                for some in sums
                if not any(other != some and all(map(operator.le, other, some)) for other in sums)
            )
        others = 0 if x.pp > 1 and x.ep > 1 else max(0, c.count // x.copies - 1)
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
            s = self.setting(c)
            once, each, alone = stage_costs.sent(own, s)
            self._sums[key] = RankSeconds(
                once.scattered + alone + once.out,
                once.gathered + once.into,
                time.optimizer(s, own),
                once.scattering,
                once.gathering,
                2 * each.gathering + each.scattering,
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
        x, size, most = c.layout, self.shared.bytes(c), 0.0
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
            fullest, behind = late * (not _settles(c)), late * (len(at.stages) > 1)
            for less, active in ((fullest, kept), (behind, 0.0))[: 1 + (behind < fullest)]:
                most = max(most, states - less + sum(memory.at_peak(size, besides, active, each, last)))
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

    def start(self, c: Choice, space: Space) -> float:
        """`shape` or less, as `Bounds.start`."""
        if self.shared.exact:
            return self.shape(c, space)
        size = self.shared.bytes(changed(c, B=MANY))
        return self._shape(c, space, MicrobatchBytes._make(c.B / MANY * some for some in size))

    def shape(self, c: Choice, space: Space) -> float:
        """Bytes of the first ranks under any schedule, with states shared as widely as possible."""
        return self._shape(c, space, self.shared.bytes(c))

    def _shape(self, c: Choice, space: Space, size: MicrobatchBytes) -> float:
        x = c.layout
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
        kept = min((size.plain, size.mixed)[mixed] for mixed in set(self.shared.second))
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
