"""Lower bounds of a layout's time, found in microseconds. With them a search leaves out layouts that cannot win without
pricing them. No bound may exceed the prediction of `predict.price`."""

from __future__ import annotations

import operator
from dataclasses import replace

from fivefold.models.section import ModelSection
from fivefold.plan.cluster.devices import Cluster
from fivefold.plan.memory import model_states
from fivefold.plan.search.bound_bytes import ROUNDING, LeastBytes
from fivefold.plan.search.shared_costs import Position, SharedCosts
from fivefold.plan.search.space import Choice, Space
from fivefold.plan.setting import Setting
from fivefold.plan.software import Software
from fivefold.plan.time import sync_costs, time
from fivefold.plan.time.cost import Cost
from fivefold.schedules.overlap import exposed_in_pieces
from fivefold.schedules.pipeline import ends_upwards, splits_backward
from fivefold.sharding.layout import changed

RankSeconds = tuple[float, float, float]
"""Seconds of a rank: gradient sums, weight gathers (both without overlap), and the optimizer."""


class Bounds:
    """Lower bounds of the seconds and bytes of layouts of a model on a cluster. `shape`, `average`, `schedule` and
    `sharing` bound the seconds: each is tighter than the one before, and slower to compute."""

    def __init__(self, model: ModelSection, cluster: Cluster, software: Software):
        self.shared = SharedCosts(model, cluster, software)
        self.bytes = LeastBytes(self.shared)
        self.model, self.cluster, self.software = model, cluster, software
        self.bare = replace(software, overlap_data=False)
        self._starts: dict[Space, list[tuple[float, float, Choice]]] = {}
        self._sums: dict[tuple[object, ...], RankSeconds] = {}
        self._all: dict[tuple[object, ...], tuple[RankSeconds, ...]] = {}
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
        micro, layers = self.shared.microbatch(c), self.model.layers
        kinds = [
            cost for cost, some in ((micro.plain, False), (micro.mixed, True)) if some in self.shared.mixed
        ]
        whole = c.count * -(-layers // c.layout.pp) * min(cost.seconds for cost in kinds)
        return (max(self._even(c), whole) + self._fixed(c)) * ROUNDING

    def _even(self, c: Choice) -> float:
        """Seconds until an average pipeline rank is done: its part of the work, and the wait until it starts."""
        micro, p, layers = self.shared.microbatch(c), c.layout.pp, self.model.layers
        mixed = self.shared.mixed.count(True)
        work = (layers - mixed) * micro.plain.seconds + mixed * micro.mixed.seconds
        kinds = [cost for cost, some in ((micro.plain, layers - mixed), (micro.mixed, mixed)) if some]
        even = c.count * (work + micro.begin.seconds + micro.end.seconds) / p
        return even + (p - 1) / 2 * min(cost.forward for cost in kinds)

    def average(self, c: Choice, space: Space) -> float:
        """`shape` plus the exposed gradient and weight traffic of an average pipeline rank. Traffic is linear in a
        rank's blocks and `exposed_in_pieces` is convex, so this is a lower bound (Jensen)."""
        p = c.layout.pp
        if self.cluster.machine or not self._blocks_everywhere(p, space):
            return self.shape(c)
        micro, mixed = self.shared.microbatch(c), self.shared.mixed.count(True) / p
        plain = self.model.layers / p - mixed
        forward, backward = _beside(
            plain, mixed, 1 / p, 1 / p, micro.plain, micro.mixed, micro.begin, micro.end
        )
        sent = self._least_sent(c, space, (plain, mixed, 1 / p, 1 / p), forward, backward)
        hops = self.shared.hops(c)[0]
        seconds = self._even(c) + sum(hops) / p + sent + self._fixed(c)
        return max(seconds * ROUNDING, self.shape(c))

    def _blocks_everywhere(self, p: int, space: Space) -> bool:
        """True if each pipeline rank has a block under every schedule, and one with experts if the model has any."""
        if p not in self._everywhere:
            layouts = (
                Choice(replace(space.shapes[0], pp=p, schedule=name, virtual_stages=virtual), 1, 1, "").layout
                for name, virtual in space.schedules(p)
            )
            some = any(self.shared.mixed)
            self._everywhere[p] = all(
                at.mixed > 0 or (at.plain > 0 and not some)
                for layout in layouts
                for at in self.shared.groups(layout)
            )
        return self._everywhere[p]

    def schedule(self, c: Choice, space: Space) -> float:
        """Seconds of a schedule under any sharing of states: the forward of the stages before a rank, its own work,
        and then their backward, or its traffic of weights and gradients."""
        micro = self.shared.microbatch(c)
        ends, turned = self._ends(c, micro.plain, micro.mixed)
        end, at, forward, backward = max(ends, key=lambda one: one[0])
        sent = self._least_sent(c, space, (at.plain, at.mixed, at.first, at.last), forward, backward)
        return (max(end + sent, turned) + self._fixed(c)) * ROUNDING

    def sharing(self, c: Choice) -> float:
        """Seconds of a layout. Each rank's earliest end takes the place of the simulated pipeline."""
        plain, mixed = self._blocks(c)
        ends, turned = self._ends(c, plain, mixed)
        longest = turned
        for end, at, forward, backward in ends:
            sums = self._sent(c, (at.plain, at.mixed, at.first, at.last))
            end = max(end, turned) if at.first else end
            longest = max(longest, end + self._unhidden(c, sums, forward, backward))
        return (longest + self._fixed(c)) * ROUNDING

    def _blocks(self, c: Choice) -> tuple[Cost, Cost]:
        """Costs of a block without and with experts, including the communication of ZeRO in every microbatch."""
        micro = self.shared.microbatch(c)
        if c.layout.zero < 2:
            return micro.plain, micro.mixed
        s, found = self.setting(c), [Cost(), Cost()]
        counted = model_states.elements(self.model, c.layout).blocks
        for kind in set(self.shared.mixed):
            own, cost = counted[self.shared.mixed.index(kind)], micro.alone[kind]
            found[kind] = (cost + sync_costs.per_microbatch(own, cost, s)).slowed(micro.slower)
        return found[0], found[1]

    def _ends(
        self, c: Choice, plain: Cost, mixed: Cost
    ) -> tuple[list[tuple[float, Position, float, float]], float]:
        """When positions have computed all their microbatches, at the earliest; with the position, and its forward and
        backward of one microbatch. And the earliest end of the step that is no position's: a microbatch passes all
        stages, there and back, and where the first position ends last, it ends behind the backward of all others."""
        micro, (there, back) = self.shared.microbatch(c), self.shared.hops(c)
        x, ends = c.layout, []
        turned = sum(self._passage(c, plain, mixed, micro.begin, micro.end))
        upwards = x.pp == 1 or ends_upwards(x.schedule, x.pp, c.count, x.stages_per_rank)
        for at in self.shared.groups(c.layout):
            forward, backward = _beside(
                at.plain, at.mixed, at.first, at.last, plain, mixed, micro.begin, micro.end
            )
            ahead, behind = _beside(*at.before, not at.first, False, plain, mixed, micro.begin, micro.end)
            end = ahead + there[at.number] + c.count * (forward + backward)
            ends.append((end, at, forward, backward))
            if upwards:
                turned = max(turned, end + behind + back[at.number])
        return ends, turned

    def _passage(self, c: Choice, plain: Cost, mixed: Cost, begin: Cost, end: Cost) -> tuple[float, float]:
        """Seconds of a microbatch's forward and backward through the whole model. Gradients of weights do not delay it
        where the schedule computes them later."""
        x, experts = c.layout, self.shared.mixed.count(True)
        if x.pp > 1 and splits_backward(x.schedule, x.pp, x.stages_per_rank):
            plain, mixed, begin, end = (cost._replace(weight=0.0) for cost in (plain, mixed, begin, end))
        return _beside(self.model.layers - experts, experts, 1, 1, plain, mixed, begin, end)

    def _least_sent(
        self, c: Choice, space: Space, at: tuple[float, ...], forward: float, backward: float
    ) -> float:
        """Seconds that sums, gathers and the optimizer add under any sharing of states. The waits of ZeRO 2 and 3
        within microbatches are left out: they hide no more of the sums than they take."""
        x = c.layout
        key = (x.tp, x.sp, x.cp, x.pp, x.ep, x.dp, at, c.mode)
        if key not in self._all:
            shape = replace(x, dp_replicate=x.dp, dp_shard=1, zero=0)
            layouts = space.sharings(shape)
            sums = {self._sent(changed(c, layout=layout), at) for layout in layouts}
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

    def _sent(self, c: Choice, at: tuple[float, ...]) -> RankSeconds:
        """Seconds of a rank. at: its blocks without and with experts, whether it has the first stage, the last."""
        x = c.layout
        key = (x.tp, x.sp, x.cp, x.pp, x.ep, x.zero, x.dp_replicate, x.dp_shard, at, c.mode)
        if key not in self._sums:
            own = self.shared.elements(x, *at)
            s = replace(self.setting(c), software=self.bare)
            self._sums[key] = (*sync_costs.per_step(s, own, 0.0, 0.0), time.optimizer(s, own))
        return self._sums[key]

    def _fixed(self, c: Choice) -> float:
        """Other seconds of a step, without those that ZeRO adds on this machine."""
        if not self.cluster.machine:
            return self.software.step
        return time.fixed(self.setting(replace(c, layout=replace(c.layout, zero=0))))


def _beside(
    blocks: float,
    with_experts: float,
    first: float,
    last: float,
    plain: Cost,
    mixed: Cost,
    begin: Cost,
    end: Cost,
) -> tuple[float, float]:
    """Seconds of forward and of backward of so many blocks, of what comes before them, and of what comes behind."""
    forward = (
        blocks * plain.forward + with_experts * mixed.forward + first * begin.forward + last * end.forward
    )
    backward = blocks * (plain.input + plain.weight) + with_experts * (mixed.input + mixed.weight)
    backward += first * (begin.input + begin.weight) + last * (end.input + end.weight)
    return forward, backward
