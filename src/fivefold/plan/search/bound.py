"""Lower bounds of a layout's time and memory, found in microseconds. With them a search leaves out layouts that cannot
win without pricing them. No bound may exceed the prediction of `predict.price`."""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fivefold.models.section import ModelSection
from fivefold.plan.cluster.devices import Cluster
from fivefold.plan.memory import memory, model_states
from fivefold.plan.memory.memory import MicrobatchBytes
from fivefold.plan.memory.model_states import Buffers
from fivefold.plan.search import routes
from fivefold.plan.search.routes import Routes
from fivefold.plan.search.shared import (
    MANY,
    Costs,
    Key,
    Position,
    Share,
    SharedCosts,
    undivided,
    within_block,
)
from fivefold.plan.search.space import Choice, Space
from fivefold.plan.setting import Setting, Software
from fivefold.plan.time import stage_costs, time
from fivefold.plan.time.cost import Cost
from fivefold.plan.time.stage_costs import pipelined
from fivefold.schedules.pipeline import FILLING, SCHEDULES, ends_upwards, holds_again, most_live
from fivefold.schedules.timelines import exposed_in_pieces
from fivefold.sharding.layout import changed, largest
from fivefold.sharding.parts import ends_of, stages_of

ROUNDING = 1 - 1e-9
ENDLESS = 1 - 1e-6  # of an endless microbatch's seconds are not spent on weights
NONE = Buffers()


class RankSeconds(NamedTuple):
    """Seconds of a rank: gradient sums and weight gathers, both without overlap, the optimizer, and what overlap does
    not hide of sums, of gathers, and of the messages of each microbatch."""

    reduced: float
    gathered: float
    updated: float
    sums: float
    gathers: float
    each: float


class MicrobatchSeconds(NamedTuple):
    """Seconds of a microbatch, divided evenly between pipeline ranks; and of the routes of each schedule."""

    even: float
    schedules: list[tuple[int, list[tuple[float, float]]]]


class Bounds:
    """Lower bounds of the seconds and bytes of layouts of a model on a cluster. `start`, `shape`, `schedule`, `sharing`
    and `simulated` bound the seconds: each is tighter than those before, and slower."""

    def __init__(self, model: ModelSection, cluster: Cluster, software: Software):
        self.shared = SharedCosts(model, cluster, software)
        self.bytes = LeastBytes(self.shared)
        self.model, self.cluster, self.software = model, cluster, software
        self._families: dict[Key, float] = {}
        self._starts: dict[Key, list[tuple[float, float, Choice]]] = {}
        self.known: dict[Space, dict[Key, float]] = {}
        """What a search has found, of each entry, for those that follow with other limits."""
        self._many: dict[Key, MicrobatchSeconds] = {}
        self._pipelines: dict[Key, tuple[float, dict[Share, float]]] = {}
        self._sums: dict[Key, RankSeconds] = {}
        self._all: dict[Key, tuple[RankSeconds, ...]] = {}
        self._fastest: dict[Key, tuple[list[dict[str, Any]], list[Routes]]] = {}

    def setting(self, c: Choice) -> Setting:
        return self.shared.setting(c)

    def family(self, space: Space, number: int) -> float:
        """Seconds of all layouts of a family, or less: of endless microbatches whose rows go to no other rank, because
        each has all experts."""
        if self.shared.exact:
            return 0.0
        if (space, number) not in self._families:
            shapes, least = space.families[number], math.inf
            for mode in space.precisions:
                c = Choice(changed(shapes[0], pp=1, ep=1, ep_fold=False), MANY, 1, mode)
                costs = self.shared.microbatch(c).costs
                work = self._microbatch(c, self._routes(c, space), costs, costs).even
                most = min(largest(space.batch, one.dp) / one.pp for one in shapes)
                least = min(least, most / MANY * work * ENDLESS + self._fixed(c))
            self._families[space, number] = least
        return self._families[space, number]

    def starts(self, space: Space, number: int) -> list[tuple[float, float, Choice]]:
        """(seconds, bytes, choice) of each start of a family: bounds for all its sizes of a microbatch."""
        if (space, number) not in self._starts:
            self._starts[space, number] = [
                (self.sizes(c, space)[0][0], self.bytes.least(c, space), c)
                for c in space.starts(space.families[number])
            ]
        return self._starts[space, number]

    def least(self, space: Space) -> float:
        """Seconds of all layouts of a space, or less."""
        found = math.inf
        for seconds, number in sorted((self.family(space, n), n) for n in range(len(space.families))):
            if seconds < found:
                found = min(found, *(start for start, _, _ in self.starts(space, number)))
        return found

    def fastest(self, choices: Sequence[Choice], space: Space) -> Iterator[Choice]:
        """Those with the least `shape` first."""
        exact = self.shared.exact
        heap = [(0.0 if exact else self.start(c, space), 0, number) for number, c in enumerate(choices)]
        heapq.heapify(heap)
        while heap:
            _, known, number = heapq.heappop(heap)
            if known:
                yield choices[number]
            else:
                heapq.heappush(heap, (self.shape(choices[number], space), 1, number))

    def sizes(self, c: Choice, space: Space) -> list[tuple[float, int]]:
        """(seconds, its number) of each size of a start's microbatch, the least first."""
        bound = self.shape if self.shared.exact else self.start
        return sorted((bound(one, space), number) for number, one in enumerate(space.sizes(c)))

    def start(self, c: Choice, space: Space) -> float:
        """`shape` or less: by what a sequence takes in one of `MANY`, found once for all sizes. (`SharedCosts.exact`
        prices need not be less there.)"""
        return self._shape(c, c.B / MANY, self._endless(c, space))

    def _endless(self, c: Choice, space: Space) -> MicrobatchSeconds:
        every, x = self._routes(c, space), c.layout
        key = (*within_block(x), x.recompute, x.pp, c.mode, id(every))
        if key not in self._many:
            one, split = changed(c, B=MANY, count=1), space.splitting(x)
            costs = self.shared.microbatch(one).costs
            late = self.shared.microbatch(changed(one, layout=split)).costs if split else costs
            self._many[key] = self._microbatch(c, every, costs, late)
        return self._many[key]

    def shape(self, c: Choice, space: Space) -> float:
        """Seconds under any schedule and any sharing of states: of work divided evenly, or along its routes. A split
        backward takes no less than a whole one, or one in a microbatch of `MANY`."""
        costs = self.shared.microbatch(c).costs
        even, schedules = self._microbatch(c, self._routes(c, space), costs, costs)
        if not self.shared.exact:
            times = c.B / MANY
            for (_, found), (_, more) in zip(schedules, self._endless(c, space).schedules, strict=True):
                found += [(times * once, times * each) for once, each in more]
        return self._shape(c, 1.0, MicrobatchSeconds(even, schedules))

    def _shape(self, c: Choice, times: float, micro: MicrobatchSeconds) -> float:
        least = min(
            max(once + c.count // copies * each for once, each in routes)
            for copies, routes in micro.schedules
        )
        return (times * max(c.count * micro.even, least) + self._fixed(c)) * ROUNDING

    def _microbatch(self, c: Choice, every: Sequence[Routes], costs: Costs, late: Costs) -> MicrobatchSeconds:
        """late: costs where backward is split."""
        whole = self.shared.whole
        work = sum(costs.of(whole)) - (costs.hidden(whole) if any(one.paired for one in every) else 0.0)
        found = ((one, late if one.splits else costs) for one in every)
        return MicrobatchSeconds(
            work / c.layout.pp, [(one.copies, one.seconds(by, whole)) for one, by in found]
        )

    def _routes(self, c: Choice, space: Space) -> list[Routes]:
        """Those of all schedules of a shape; equal ones are the same list."""
        ways = space.schedules(c.layout)
        key = id(ways), c.layout.pp, min(c.count, FILLING * c.layout.pp)
        if key not in self._fastest:
            found = routes.fastest(self.shared, c.layout, ways, c.count)
            same = (other for _, other in self._fastest.values() if other == found)
            self._fastest[key] = ways, next(same, found)
        return self._fastest[key][1]

    def schedules(self, c: Choice, space: Space) -> list[tuple[float, int]]:
        """(`schedule` or less, its number) of each schedule of a shape, the least first: no traffic is counted."""
        found = list[tuple[float, int]]()
        for number, way in enumerate(space.schedules(c.layout)):
            one = changed(c, layout=changed(c.layout, **way))
            ends, turned = self._ends(one, self.shared.microbatch(one).costs)
            longest = max(turned, *(end for end, *_ in ends))
            found.append(((longest + self._fixed(c)) * ROUNDING, number))
        return sorted(found)

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
        turned = sum(routes.passing(costs, x.splits_backward).of(self.shared.whole))
        upwards = x.pp == 1 or ends_upwards(x.schedule, x.pp, c.count, x.stages_per_rank)
        paired = SCHEDULES[x.schedule].paired
        for at in self.shared.groups(x):
            forward, backward = costs.of(at.part)
            ahead, behind = costs.of(at.before)
            busy = forward + backward - (costs.hidden(at.part) if paired else 0.0)
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
        key = (x.tp, x.sp, x.cp, x.pp, x.ep, x.ep_fold, x.dp, part, c.mode)
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
        key = (x.tp, x.sp, x.cp, x.pp, x.ep, x.ep_fold, x.zero, x.dp_replicate, x.dp_shard, part, c.mode)
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
        self._positions: dict[Key, tuple[Held, ...]] = {}
        self._fewest: dict[Key, list[tuple[Held, ...]]] = {}
        self._firsts: dict[Key, Held] = {}
        self._any: dict[Key, list[list[Held]]] = {}
        self._states: dict[Key, dict[Key, tuple[float, float, Buffers]]] = {}

    def of(self, c: Choice, buffers: bool = True) -> float:
        """Bytes of the ranks that probably hold most. Without buffers it is a bound for every way to share states, if
        this layout's is the one that keeps least."""
        return self._most(c, self.shared.bytes(c), [self._fullest(c)], buffers)

    def least(self, c: Choice, space: Space) -> float:
        """`start` or less, for the smallest microbatch of a shape and for all others."""
        x = c.layout
        key = (x.pp, x.dp, x.tp > 1, x.cp > 1, x.ep > 1)
        if key not in self._any:
            every = [self._first(one, space).times(one.B) for one in space.sizes(c)]
            apart = ([rank for rank in every if rank.once == once] for once in (True, False))
            self._any[key] = [[_smallest(ranks)] for ranks in apart if ranks]
        lean = changed(c, layout=space.leanest(x))
        return self._most(lean, self._scaled(c), self._any[key], False)

    def light(self, c: Choice, space: Space) -> float:
        """By which layouts are chosen that offload something, which is no bound: bytes of the least of everything that
        the first rank holds under any schedule."""
        x, rank = c.layout, self._first(c, space)
        settled = c.count >= 4 * x.pp and c.count % x.pp == 0
        lean, part = changed(c, layout=space.leanest(x)), rank.part._replace(last=False)
        rank = rank._replace(part=part, live=rank.live._replace(begin=0, end=0), settles=settled)
        return self._most(lean, self.shared.bytes(c), [[rank]], False)

    def _first(self, c: Choice, space: Space) -> Held:
        """The least of everything that the first rank holds under any schedule."""
        x = c.layout
        key = (x.pp, c.count, x.tp > 1, x.cp > 1, x.ep > 1)
        if key not in self._firsts:
            ways = [changed(c, layout=changed(x, **way)) for way in space.schedules(x)]
            held = [_held(one, self.shared.positions(one.layout)[0]) for one in ways]
            self._firsts[key] = _smallest(held)
        return self._firsts[key]

    def start(self, c: Choice, space: Space) -> float:
        """`shape` or less, as `Bounds.start`."""
        lean = changed(c, layout=space.leanest(c.layout))
        return self._most(lean, self._scaled(c), self._ways(c, space), False)

    def shape(self, c: Choice, space: Space) -> float:
        """`of` or less, under any schedule and with states shared in any way."""
        lean = changed(c, layout=space.leanest(c.layout))
        return self._most(lean, self.shared.bytes(c), self._ways(c, space), False)

    def _scaled(self, c: Choice) -> MicrobatchBytes:
        """No more bytes than those of the microbatch: what its sequences take in one of `MANY`."""
        if self.shared.exact:
            return self.shared.bytes(c)
        factor = c.B / MANY
        return MicrobatchBytes._make([factor * size for size in self.shared.bytes(changed(c, B=MANY))])

    def _most(self, c: Choice, size: MicrobatchBytes, ways: Sequence[Sequence[Held]], buffers: bool) -> float:
        """Bytes of the rank that holds most, under the schedule with which that is least. Of the choice's layout
        only the sharing of states counts, not the schedule."""
        x, least = c.layout, math.inf
        key = (x.tp, x.ep, x.ep_fold, x.sp, x.pp > 1, x.zero, x.dp_shard * x.cp, c.mode)
        known = self._states.setdefault(key, {})
        for ranks in ways:
            most = 0.0
            for rank in ranks:
                if (key := (rank.part, rank.once)) not in known:
                    known[key] = self._states_of(c, rank)
                most = max(most, self._rank(*known[key], size, rank, buffers))
                if most >= least:
                    break
            least = min(least, most)
        return ROUNDING * (least + memory.transfers(size, x, c.count))

    def _rank(
        self, states: float, late: float, besides: Buffers, size: MicrobatchBytes, rank: Held, buffers: bool
    ) -> float:
        kept, each = sum(map(operator.mul, rank.live, size)), sum(map(operator.mul, rank.part, size))
        besides, last = besides if buffers else NONE, bool(rank.part.last)
        # gradients of several stages need not exist at once, nor any of them when most is live
        fullest, behind = late * (not rank.settles), late * rank.several
        most = states - fullest + sum(memory.at_peak(size, besides, kept, each, last))
        if behind < fullest:
            most = max(most, states - behind + sum(memory.at_peak(size, besides, 0.0, each, last)))
        return most

    def _fullest(self, c: Choice) -> tuple[Held, ...]:
        """What three pipeline positions hold: the first, the one with most blocks times live microbatches, the one with
        most blocks."""
        x = c.layout
        key = (x.pp, x.schedule, x.virtual_stages, x.bare_ends, c.count)
        if key not in self._positions:
            every = [_held(c, at) for at in self.shared.positions(x)]
            most = max(every, key=lambda one: one.live.plain + one.live.mixed)
            blocks = max(every, key=lambda one: one.part.plain + one.part.mixed)
            self._positions[key] = (*dict.fromkeys((every[0], most, blocks)),)
        return self._positions[key]

    def _ways(self, c: Choice, space: Space) -> list[tuple[Held, ...]]:
        """The same under every schedule of a shape that does not hold more of everything than another one."""
        x = c.layout
        key = (x.pp, c.count, x.tp > 1, x.cp > 1, x.ep > 1)
        if key not in self._fewest:
            choices = (changed(c, layout=changed(x, **way)) for way in space.schedules(x))
            found = self._fewest[key] = list[tuple[Held, ...]]()
            for way in sorted(set(map(self._fullest, choices)), key=lambda way: max(map(Held.amount, way))):
                if not any(all(any(one.under(rank) for rank in way) for one in other) for other in found):
                    found.append(way)
        return self._fewest[key]

    def _states_of(self, c: Choice, rank: Held) -> tuple[float, float, Buffers]:
        """Bytes of the states of a rank, those of them that a pipeline does not always hold, and its buffers."""
        part, s = rank.part, self.shared.setting(changed(c, count=1 if rank.once else 2))
        own = self.shared.elements(c.layout, part)
        late = model_states.adding_up(s, own)[0] if c.layout.pp > 1 else 0.0
        besides = model_states.buffers(s, bool(part.first), bool(part.last))
        return sum(model_states.rank_states(s, own)), late, besides


class Live(NamedTuple):
    """Blocks of the first and of the second kind, beginnings and ends of the model, times microbatches that are live in
    them; and those blocks times microbatches that wait for weight gradients."""

    plain: int
    mixed: int
    begin: int
    end: int
    owed_plain: int
    owed_mixed: int


class Held(NamedTuple):
    """What a pipeline rank holds when it holds most. part: of the model. settles: it holds as much again and again,
    also when the gradients of all its stages add up. several: it has several stages. once: of one microbatch."""

    part: Share
    live: Live
    settles: bool
    several: bool
    once: bool

    def times(self, B: int) -> Held:
        """With B times as many live sequences: where a rank computes the loss, it holds the end of one sequence in any
        case (`memory.at_peak`)."""
        live = Live(*(B * count for count in self.live))
        return self._replace(live=live._replace(end=live.end - (B - 1) * self.part.last))

    def amounts(self) -> tuple[float, ...]:
        """By which a rank's bytes grow."""
        more = (self.live.end - self.part.last, self.settles, not self.several)
        return *self.part, *self.live, *more

    def under(self, other: Held) -> bool:
        """True if it holds no more of anything."""
        return all(map(operator.le, self.amounts(), other.amounts()))

    def amount(self) -> float:
        return sum(self.amounts())


def _smallest(ranks: Sequence[Held]) -> Held:
    """The least of each that ranks hold."""
    part = Share(*map(min, zip(*(rank.part for rank in ranks), strict=True)))
    live = Live(*map(min, zip(*(rank.live for rank in ranks), strict=True)))
    return Held(part, live, False, True, ranks[0].once)


def _held(c: Choice, at: Position) -> Held:
    x, counts = c.layout, ((1,), (0,))
    if x.pp > 1:
        counts = most_live(x.schedule, at.number, x.pp, c.count, x.stages_per_rank)
    live = [0] * len(Live._fields)
    for stage, blocks, waiting, owed in zip(stages_of(x, at.number), at.stages, *counts, strict=True):
        one = (
            *(waiting * some for some in (*blocks, *ends_of(x, [stage]))),
            *(owed * some for some in blocks),
        )
        live = [*map(operator.add, live, one)]
    if (
        live[3] < at.part.last
    ):  # `memory.at_peak` subtracts the end of one, but a second copy of the model may have none
        live = [0] * len(live)
    return Held(at.part, Live(*live), _settles(c, at.number), len(at.stages) > 1, c.count == 1)


def _settles(c: Choice, rank: int) -> bool:
    """True if a rank holds most again while the gradients of all its stages add up. With several stages the
    microbatches are whole rounds; with two copies of the model it may be other stages that it holds then."""
    x, chunks = c.layout, c.layout.stages_per_rank
    if x.copies > 1 or c.count < FILLING * x.pp or (chunks > 1 and c.count % x.pp):
        return False
    return x.pp == 1 or holds_again(x.schedule, rank, x.pp, chunks)
