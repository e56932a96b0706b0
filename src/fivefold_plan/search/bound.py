"""Lower bounds of a layout's seconds, found in microseconds. With them and those of bytes (`bound_bytes.py`) a search
leaves out layouts that cannot win without pricing them. No bound may exceed the prediction of `predict.price`."""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fivefold.models.section import ModelSection
from fivefold.schedules.pipeline import FILLING, SCHEDULES, ends_upwards
from fivefold.schedules.timelines import exposed_in_pieces
from fivefold.sharding.layout import changed, largest
from fivefold_plan.cluster.devices import Cluster
from fivefold_plan.memory import model_states
from fivefold_plan.search import routes
from fivefold_plan.search.bound_bytes import ROUNDING, LeastBytes
from fivefold_plan.search.routes import Routes
from fivefold_plan.search.shared import (
    MANY,
    Costs,
    Key,
    Position,
    Share,
    SharedCosts,
    undivided,
    within_block,
)
from fivefold_plan.search.space import Choice, Space
from fivefold_plan.setting import Setting, Software
from fivefold_plan.time import stage_costs, time
from fivefold_plan.time.cost import Cost
from fivefold_plan.time.stage_costs import pipelined

ENDLESS = 1 - 1e-6  # the share of an endless microbatch's seconds that does not go to weights
Sizes = list[tuple[float, int]]


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
    """Lower bounds of the seconds and bytes of layouts of a model on a cluster. Those of the seconds, in the order in
    which a search asks them: `family`, `start`, `shape`, `schedules`, `schedule`, `sharing`, `simulated`. Each is
    tighter than those before, and slower."""

    def __init__(self, model: ModelSection, cluster: Cluster, software: Software):
        self.shared = SharedCosts(model, cluster, software)
        self.bytes = LeastBytes(self.shared)
        self.model, self.cluster, self.software = model, cluster, software
        self._families: dict[Key, float] = {}
        self._starts: dict[Key, list[tuple[Sizes, float, Choice]]] = {}
        self.known: dict[Space, dict[Key, Any]] = {}
        """Bounds of each entry that a search has found, for those that follow with other limits."""
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

    def starts(self, space: Space, number: int) -> list[tuple[Sizes, float, Choice]]:
        """(`sizes`, bytes, choice) of each start of a family. bytes: a bound for all its sizes of a microbatch."""
        if (space, number) not in self._starts:
            self._starts[space, number] = [
                (self.sizes(c, space), self.bytes.least(c, space), c)
                for c in space.starts(space.families[number])
            ]
        return self._starts[space, number]

    def least(self, space: Space) -> float:
        """Seconds of all layouts of a space, or less; 0 if there are none."""
        found = math.inf
        for seconds, number in sorted((self.family(space, n), n) for n in range(len(space.families))):
            if seconds < found:
                found = min(found, *(sizes[0][0] for sizes, *_ in self.starts(space, number)))
        return found if space.families else 0.0

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

    def sizes(self, c: Choice, space: Space) -> Sizes:
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
