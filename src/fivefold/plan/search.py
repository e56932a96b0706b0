"""Finds the layouts that train a recipe fastest on a cluster, of all that are valid (`space.py`).

Best first: what a layout takes at least (`bound.py`) is refined step by step, and always that is refined which may
still be fastest: a shape with its microbatch; with a schedule; with who shares states; all but the simulated pipeline;
the whole prediction. A prediction that comes out first is faster than anything that is left, for no bound exceeds what
it is a bound of. So nothing valid is left out, and few layouts are priced.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any

from fivefold.errors import UserError
from fivefold.plan import memory
from fivefold.plan.advice import nothing_fits, nothing_valid
from fivefold.plan.binding import limits, reasons
from fivefold.plan.bound import Bounds
from fivefold.plan.clusters import Cluster
from fivefold.plan.predict import Plan, dtype_of, limit, price, resolved, with_reduce
from fivefold.plan.software import FIVEFOLD, Software
from fivefold.plan.space import Choice, Space
from fivefold.recipe import Recipe
from fivefold.recipe.rules import with_layout

GLIMPSE = 32
PRICED = 4  # levels of refinement before
SMALLEST = 20  # where nothing fits, of so many that seem smallest the one that is


@dataclass(frozen=True)
class Found:
    """plans: best first. rejected: how many layouts lost, by reason. reasons: why each plan is behind the first.
    binding: what holds the first back, a sentence each. nothing: where no layout fits, what would be needed. within:
    the fastest plan that takes at most so many bytes."""

    plans: list[Plan]
    considered: int
    rejected: dict[str, int]
    reasons: list[str] = field(default_factory=list)
    binding: list[str] = field(default_factory=list)
    nothing: str = ""
    within: Callable[[float], Plan | None] = lambda most: None

    def as_json(self) -> dict[str, Any]:
        plans = [plan.as_json() | {"lost": why} for plan, why in zip(self.plans, self.reasons, strict=True)]
        return {
            "plans": plans,
            "considered": self.considered,
            "rejected": self.rejected,
            "binding": self.binding,
            "nothing": self.nothing,
        }


class Search:
    """One search for plans of at most `most` bytes that take less than `below` seconds. lost: how many layouts it found
    not to fit."""

    def __init__(self, space: Space, bounds: Bounds, most: float, below: float = math.inf):
        self.space, self.bounds, self.most, self.below = space, bounds, most, below
        self.lost = self.tried = 0
        self._number = count()
        self._heap: list[tuple[float, float, int, int, Any]] = []

    def plans(self) -> Iterator[Plan]:
        """Every plan that fits, the fastest first; of equally fast ones that with more room."""
        self._start()
        while self._heap:
            if plan := self._refine():
                yield plan

    def glimpse(self, tries: int = GLIMPSE) -> Plan | None:
        """The fastest of the plans that fit among the `tries` most promising layouts, which need not be the best."""
        self._start()
        while self._heap and self.tried < tries:
            if plan := self._refine():
                return plan
        plans = [what for *_, level, what in self._heap if level == PRICED]
        return min(plans, key=lambda plan: plan.step.seconds, default=None)

    def _start(self) -> None:
        for seconds, size, choice in self.bounds.starts(self.space):
            if size <= self.most:
                self._push(seconds, 0, choice)
            else:
                self.lost += self.space.kinds(choice.layout)

    def _refine(self) -> Plan | None:
        """Looks closer at what may still be fastest. Returns it where nothing is left to be looked at."""
        seconds, _, _, level, what = heapq.heappop(self._heap)
        if level == PRICED:
            return what
        (self._schedules, self._sharings, self._layout, self._price)[level](seconds, what)
        return None

    def _push(self, seconds: float, level: int, what: Any, peak: float = 0.0) -> None:
        if seconds < self.below:
            heapq.heappush(self._heap, (seconds, peak, next(self._number), level, what))

    def _schedules(self, seconds: float, c: Choice) -> None:
        lean = self.space.leanest(c.layout)
        for name, virtual in self.space.schedules(c.layout.pp):
            smallest = replace(c, layout=replace(lean, schedule=name, virtual_stages=virtual))
            if self.bounds.bytes(smallest, buffers=False) > self.most:
                self.lost += len(self.space.sharings(c.layout))
                continue
            one = replace(c, layout=replace(c.layout, schedule=name, virtual_stages=virtual))
            self._push(max(seconds, self.bounds.schedule(one) + self.bounds.software.step), 1, one)

    def _sharings(self, seconds: float, c: Choice) -> None:
        scheduled = self.bounds.schedule(c)
        for layout in self.space.sharings(c.layout):
            one = replace(c, layout=layout)
            if self.bounds.bytes(one) <= self.most:
                self._push(max(seconds, self.bounds.sharing(one, scheduled)), 2, one)
            else:
                self.lost += 1

    def _layout(self, seconds: float, c: Choice) -> None:
        """All but what a pipeline waits besides, and the bytes."""
        self._push(max(seconds, self.bounds.step(c)), 3, c)

    def _price(self, seconds: float, c: Choice) -> None:
        self.tried += 1
        s = self.bounds.setting(c)
        held = memory.predict(s.model, s.layout, s.sizes, s.software, s.dtype, s.microbatches)
        size = max(m.total for m in held)
        if round(size) <= self.most:
            plan = price(s)
            self._push(plan.step.seconds, PRICED, plan, plan.peak_bytes)
        else:
            self.lost += 1

    def smallest(self) -> Plan:
        """A layout that takes least memory: of those that seem to, counted in full."""
        starts = heapq.nsmallest(SMALLEST, self.bounds.starts(self.space), key=lambda start: start[1])
        choices = (
            replace(c, layout=replace(layout, schedule=name, virtual_stages=virtual))
            for _, _, c in starts
            for layout in self.space.sharings(c.layout)
            for name, virtual in self.space.schedules(c.layout.pp)
        )
        plans = (
            price(self.bounds.setting(c)) for c in heapq.nsmallest(SMALLEST, choices, key=self.bounds.bytes)
        )
        return min(plans, key=lambda plan: plan.peak_bytes)


def search(recipe: Recipe, cluster: Cluster, top: int = 10, software: Software = FIVEFOLD) -> Found:
    """The `top` fastest layouts that fit. The recipe's own layout and microbatches do not matter; with
    `precision.mode = "auto"` all dtypes are considered.

    Raises:
        UserError: the cluster has no number of devices; no layout is valid; the device lacks the dtype.
    """
    space = space_of(recipe, cluster)
    bounds = Bounds(space.recipe.model, cluster, with_reduce(software, recipe.precision.reduce))
    run = Search(space, bounds, limit(cluster))
    plans = list(islice(run.plans(), top))
    slower = space.size - len(plans) - run.lost
    rejected = {reason: n for reason, n in (("do not fit", run.lost), ("slower", slower)) if n}
    if not plans:
        return Found([], space.size, rejected, nothing=nothing_fits(space, bounds, run.smallest()))

    def within(most: float) -> Plan | None:
        return next(Search(space, bounds, most).plans(), None)

    return Found(plans, space.size, rejected, reasons(plans), _binding(space, bounds, plans), "", within)


def _binding(space: Space, bounds: Bounds, plans: list[Plan]) -> list[str]:
    """What holds the best plan back; what only a search can tell is looked for among few."""
    best = plans[0].step.seconds
    roomier = Search(space, bounds, math.inf, best)
    wider = Search(replace(space, indivisible=True), bounds, limit(space.cluster), best)
    return limits(plans, roomier.glimpse(), wider.glimpse())


def space_of(recipe: Recipe, cluster: Cluster) -> Space:
    """What there is to search.

    Raises:
        UserError: nothing.
    """
    if not cluster.devices:
        raise UserError(
            f"cluster '{cluster.name}': a search needs a number of devices, for example {cluster.name}:64"
        )
    dtype_of(recipe, cluster)
    space = Space(resolved(recipe), cluster)
    if not space.size:
        raise UserError(nothing_valid(space))
    return space


def apply(recipe: Recipe, plan: Plan) -> Recipe:
    """The recipe that trains as planned."""
    s = plan.setting
    changed = with_layout(recipe, plan.layout, microbatch_size=s.sizes.B)
    precision = changed.precision.model_copy(update={"mode": s.dtype})
    return changed.model_copy(update={"precision": precision})
