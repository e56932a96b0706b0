"""Lower bounds of a layout's time and memory, found in microseconds. With them a search leaves out layouts that cannot
win without pricing them. No bound may exceed the prediction of `predict.price`."""

from __future__ import annotations

import operator
from dataclasses import replace

from fivefold.models.section import ModelSection
from fivefold.plan.cluster.devices import Cluster
from fivefold.plan.memory import memory, model_states
from fivefold.plan.memory.model_states import Buffers
from fivefold.plan.search.shared_costs import Costs, Position, Share, SharedCosts, within_block
from fivefold.plan.search.space import Choice, Space
from fivefold.plan.setting import Setting, Software
from fivefold.plan.time import stage_costs, time
from fivefold.plan.time.cost import Cost
from fivefold.schedules.overlap import exposed_in_pieces
from fivefold.schedules.pipeline import ends_upwards, most_live, splits_backward
from fivefold.sharding.layout import changed

ROUNDING = 1 - 1e-9
NONE = Buffers()
Key = tuple[object, ...]
RankSeconds = tuple[float, float, float]
"""Seconds of a rank: gradient sums, weight gathers (both without overlap), and the optimizer."""
Live = tuple[tuple[int, ...], tuple[int, ...]]
"""Microbatches in each stage of a position when it holds most: those that wait for backward; for weight gradients."""


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
        self._everywhere: dict[int, bool] = {}

    def setting(self, c: Choice) -> Setting:
        return self.shared.setting(c)

    def starts(self, space: Space) -> list[tuple[float, float, Choice]]:
        """Bounds of seconds and bytes for each shape with its microbatch, recomputation and dtype."""
        if space not in self._starts:
            self._starts[space] = [(self.shape(c), self.bytes.shape(c, space), c) for c in space.starts()]
        return self._starts[space]

    def shape(self, c: Choice) -> float:
        """Seconds under any schedule and any sharing of states: all work divided evenly, or in whole blocks."""
        costs, layers = self.shared.microbatch(c).costs, self.model.layers
        kinds = [
            cost for cost, kind in ((costs.plain, False), (costs.mixed, True)) if kind in self.shared.mixed
        ]
        whole = c.count * -(-layers // c.layout.pp) * min(cost.seconds for cost in kinds)
        return (max(self._even(c), whole) + self._fixed(c)) * ROUNDING

    def _even(self, c: Choice) -> float:
        """Seconds until an average pipeline rank is done: its part of the work, and the wait until it starts."""
        costs, p, layers = self.shared.microbatch(c).costs, c.layout.pp, self.model.layers
        mixed = self.shared.mixed.count(True)
        work = (layers - mixed) * costs.plain.seconds + mixed * costs.mixed.seconds
        kinds = [cost for cost, number in ((costs.plain, layers - mixed), (costs.mixed, mixed)) if number]
        even = c.count * (work + costs.begin.seconds + costs.end.seconds) / p
        return even + (p - 1) / 2 * min(cost.forward for cost in kinds)

    def average(self, c: Choice, space: Space) -> float:
        """`shape` plus the exposed gradient and weight traffic of an average pipeline rank. Traffic is linear in a
        rank's blocks and `exposed_in_pieces` is convex, so this is a lower bound (Jensen)."""
        p = c.layout.pp
        if self.cluster.machine or not self._blocks_everywhere(p, space):
            return self.shape(c)
        mixed = self.shared.mixed.count(True) / p
        part = Share(self.model.layers / p - mixed, mixed, 1 / p, 1 / p)
        sent = self._least_sent(c, space, part, *self.shared.microbatch(c).costs.of(part))
        seconds = self._even(c) + sum(self.shared.hops(c)[0]) / p + sent + self._fixed(c)
        return max(seconds * ROUNDING, self.shape(c))

    def _blocks_everywhere(self, p: int, space: Space) -> bool:
        """True if each pipeline rank has a block under every schedule, and one with experts if the model has any."""
        if p not in self._everywhere:
            shape, experts = replace(space.shapes[0], pp=p), any(self.shared.mixed)
            self._everywhere[p] = all(
                at.part.mixed > 0 or (at.part.plain > 0 and not experts)
                for name, virtual in space.schedules(p)
                for at in self.shared.groups(replace(shape, schedule=name, virtual_stages=virtual))
            )
        return self._everywhere[p]

    def schedule(self, c: Choice, space: Space) -> float:
        """Seconds of a schedule under any sharing of states: the forward of the stages before a rank, its own work,
        and then their backward, or its traffic of weights and gradients."""
        ends, turned = self._ends(c, self.shared.microbatch(c).costs)
        end, at, forward, backward = max(ends, key=lambda one: one[0])
        sent = self._least_sent(c, space, at.part, forward, backward)
        return (max(end + sent, turned) + self._fixed(c)) * ROUNDING

    def sharing(self, c: Choice) -> float:
        """Seconds of a layout. Each rank's earliest end takes the place of the simulated pipeline."""
        ends, turned = self._ends(c, self._with_zero(c))
        longest = turned
        for end, at, forward, backward in ends:
            sums = self._sent(c, at.part)
            end = max(end, turned) if at.part.first else end
            longest = max(longest, end + self._unhidden(c, sums, forward, backward))
        return (longest + self._fixed(c)) * ROUNDING

    def _with_zero(self, c: Choice) -> Costs:
        """Costs of a microbatch, including the communication of ZeRO in every microbatch."""
        micro = self.shared.microbatch(c)
        if c.layout.zero < 2:
            return micro.costs
        s, blocks = self.setting(c), [Cost(), Cost()]
        elements = model_states.elements(self.model, c.layout).blocks
        for kind in set(self.shared.mixed):
            own, cost = elements[self.shared.mixed.index(kind)], micro.alone[kind]
            blocks[kind] = (cost + stage_costs.per_microbatch(own, cost, s)).slowed(micro.slower)
        return micro.costs._replace(plain=blocks[False], mixed=blocks[True])

    def _ends(self, c: Choice, costs: Costs) -> tuple[list[tuple[float, Position, float, float]], float]:
        """When positions have computed all their microbatches, at the earliest; with the position, and its forward and
        backward of one microbatch. And the earliest end of the step that is no position's: a microbatch passes all
        stages, there and back, and where the first position ends last, it ends behind the backward of all others."""
        x, ends, (there, back) = c.layout, [], self.shared.hops(c)
        turned = sum(self._passage(c, costs))
        upwards = x.pp == 1 or ends_upwards(x.schedule, x.pp, c.count, x.stages_per_rank)
        for at in self.shared.groups(c.layout):
            forward, backward = costs.of(at.part)
            ahead, behind = costs.of(at.before)
            end = ahead + there[at.number] + c.count * (forward + backward)
            ends.append((end, at, forward, backward))
            if upwards:
                turned = max(turned, end + behind + back[at.number])
        return ends, turned

    def _passage(self, c: Choice, costs: Costs) -> tuple[float, float]:
        """Seconds of a microbatch's forward and backward through the whole model. Gradients of weights do not delay it
        where the schedule computes them later."""
        x, experts = c.layout, self.shared.mixed.count(True)
        if x.pp > 1 and splits_backward(x.schedule, x.pp, x.stages_per_rank):
            costs = Costs(*(cost._replace(weight=0.0) for cost in costs))
        return costs.of(Share(self.model.layers - experts, experts, 1, 1))

    def _least_sent(self, c: Choice, space: Space, part: Share, forward: float, backward: float) -> float:
        """Seconds that sums, gathers and the optimizer add under any sharing of states. The waits of ZeRO 2 and 3
        within microbatches are left out: they hide no more of the sums than they take."""
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
        return min(self._unhidden(c, sums, forward, backward) for sums in self._all[key])

    def _unhidden(self, c: Choice, sums: RankSeconds, forward: float, backward: float) -> float:
        reduced, gathered, updated = sums
        if self.software.overlap_data:
            blocks = max(1, self.model.layers // c.layout.pp)
            reduced = exposed_in_pieces(reduced, 0.0, backward, blocks)
            gathered = exposed_in_pieces(gathered, 0.0, forward, blocks)
        return reduced + gathered + updated

    def _sent(self, c: Choice, part: Share) -> RankSeconds:
        """Seconds of a rank with this part of the model."""
        x = c.layout
        key = (x.tp, x.sp, x.cp, x.pp, x.ep, x.zero, x.dp_replicate, x.dp_shard, part, c.mode)
        if key not in self._sums:
            own = self.shared.elements(x, part)
            s = replace(self.setting(c), software=self.bare)
            self._sums[key] = (*stage_costs.per_step(s, own, 0.0, 0.0), time.optimizer(s, own))
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
        self._fewest: dict[tuple[int, int], tuple[Share, int]] = {}
        self._kept: dict[Key, list[tuple[Position, float, float]]] = {}
        self._states: dict[Key, tuple[float, Buffers]] = {}

    def of(self, c: Choice, buffers: bool = True) -> float:
        """Bytes of the ranks that probably hold most. Without buffers it is a bound for every way to share states, if
        this layout's is the one that keeps least."""
        one, most = self.shared.microbatch(c).bytes, 0.0
        for at, live, own in self._fullest(c):
            states, besides = self._held(c, at.part)
            peak = memory.at_peak(one, besides if buffers else NONE, live, own, bool(at.part.last))
            most = max(most, states + sum(peak))
        return ROUNDING * (most + memory.transfers(one, c.layout, c.count))

    def _fullest(self, c: Choice) -> list[tuple[Position, float, float]]:
        """Three pipeline positions: the first, the one with most blocks times live microbatches, the one with most
        blocks. With each the bytes that its live microbatches keep at least, and the bytes that one of them keeps."""
        x = c.layout
        key = (*within_block(x), x.recompute, c.B, c.mode, c.count, x.pp, x.schedule, x.virtual_stages)
        if key not in self._kept:
            positions = self.shared.positions(x)
            live = [_live(c, number) for number in range(x.pp)]
            chosen = {
                0,
                max(range(x.pp), key=lambda n: _live_blocks(live[n], positions[n])),
                max(range(x.pp), key=lambda n: positions[n].part.plain + positions[n].part.mixed),
            }
            self._kept[key] = [(positions[n], *self._keeps(c, positions[n], live[n])) for n in chosen]
        return self._kept[key]

    def _keeps(self, c: Choice, at: Position, live: Live) -> tuple[float, float]:
        """Bytes that the live microbatches of a position keep, and those that one of them does."""
        one, kept, own = self.shared.microbatch(c).bytes, 0.0, 0.0
        for number, (plain, mixed) in enumerate(at.stages):
            size = plain * one.plain + mixed * one.mixed
            size += at.part.first * (number == 0) * one.begin
            size += at.part.last * (number == len(at.stages) - 1) * one.end
            owed = plain * one.owed_plain + mixed * one.owed_mixed
            kept, own = kept + live[0][number] * size + live[1][number] * owed, own + size
        return kept, own

    def _held(self, c: Choice, part: Share) -> tuple[float, Buffers]:
        """Bytes of the states of a rank with this part of the model, and its buffers."""
        x = c.layout
        key = (x.tp, x.ep, x.sp, x.pp > 1, x.zero, x.dp_shard * x.cp, part, c.mode, c.count == 1)
        if key not in self._states:
            s = self.shared.setting(c)
            held = sum(model_states.rank_states(s, self.shared.elements(x, part)))
            self._states[key] = held, model_states.buffers(s, bool(part.first), bool(part.last))
        return self._states[key]

    def shape(self, c: Choice, space: Space) -> float:
        """Bytes of the first ranks under any schedule, with states shared as widely as possible."""
        one, (part, blocks) = self.shared.microbatch(c).bytes, self._first_ranks(c, space)
        x = c.layout
        key = (x.tp, x.ep, x.sp, x.pp, x.dp * x.cp, c.mode, c.count == 1, part)
        if key not in self._states:
            lean = self.shared.setting(replace(c, layout=space.leanest(x)))
            self._states[key] = (
                sum(model_states.rank_states(lean, self.shared.elements(lean.layout, part))),
                NONE,
            )
        kept = [size for size, number in ((one.plain, part.plain), (one.mixed, part.mixed)) if number]
        live = blocks * min(kept, default=0.0) + one.again + one.inside
        return (self._states[key][0] + live + memory.transfers(one, x, c.count)) * ROUNDING

    def _first_ranks(self, c: Choice, space: Space) -> tuple[Share, int]:
        """The smallest part of the model that the first ranks have under any schedule, and the fewest blocks times live
        microbatches."""
        key = (c.layout.pp, c.count)
        if key not in self._fewest:
            ways = space.schedules(c.layout.pp)
            choices = [replace(c, layout=replace(c.layout, schedule=n, virtual_stages=v)) for n, v in ways]
            first = [self.shared.positions(choice.layout)[0] for choice in choices]
            part = Share(min(at.part.plain for at in first), min(at.part.mixed for at in first), True, False)
            live = (_live_blocks(_live(choice, 0), at) for choice, at in zip(choices, first, strict=True))
            self._fewest[key] = part, min(live)
        return self._fewest[key]


def _live_blocks(live: Live, at: Position) -> int:
    return sum(count * sum(kinds) for count, kinds in zip(live[0], at.stages, strict=True))


def _live(c: Choice, rank: int) -> Live:
    x = c.layout
    return most_live(x.schedule, rank, x.pp, c.count, x.stages_per_rank) if x.pp > 1 else ((1,), (0,))
