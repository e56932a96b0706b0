"""A best-first search on lower bounds (`bound.py`). It always refines the entry with the lowest bound: first a shape
with its microbatch, then with its traffic, with a schedule, with a sharding of states, and finally the full prediction.
A prediction that reaches the top is faster than everything left, because no bound exceeds its layout's prediction. So
the search is exact, and prices few layouts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from itertools import islice
from operator import itemgetter
from typing import Any

from fivefold.sharding.layout import changed
from fivefold_plan.predict import Plan, held, price
from fivefold_plan.search.bound import Bounds, Sizes
from fivefold_plan.search.bound_bytes import LeastBytes
from fivefold_plan.search.space import Choice, Space
from fivefold_plan.time.time import step

GLIMPSE = 32
ALL = slice(None)
COUNTED = 100  # if nothing fits, the layouts that are counted exactly, of each number of devices
GROWN = 1.002  # by which the lowest bound has grown when `progress` says so
Order = tuple[int, ...]
"""A layout's place in the space. The first of equal layouts wins, so that a search always gives the same result."""
Refine = Callable[["Search", float, Order, Any], None]
"""What is done with an entry if its bound is the lowest. No bound method: a search ends with whoever holds it."""


class Search:
    """A search for plans with at most `most` bytes and less than `below` seconds. part: of the families. lost: layouts
    that do not fit. looked: refined entries."""

    def __init__(self, space: Space, bounds: Bounds, most: float, below: float = math.inf, part: slice = ALL):
        self.space, self.bounds, self.most, self.below, self.part = space, bounds, most, below, part
        self.lost = self.tried = self.looked = 0
        # (bound, peak, order, how it is refined, what it is); None: it is a full prediction
        self._heap: list[tuple[float, float, Order, Refine | None, Any]] = []
        self._known = bounds.known.setdefault(space, {})

    def plans(self) -> Iterator[Plan]:
        """Every plan that fits, fastest first. Among equally fast ones the smaller comes first."""
        return (plan for *_, plan in self.progress() if plan)

    def progress(self) -> Iterator[tuple[float, Order, Plan | None]]:
        """(seconds, order, plan) of `plans`; and (seconds, (), None) now and then: those to come take no less."""
        self._start()
        said = 0.0
        while self._heap:
            seconds, _, order, *_ = self._heap[0]
            if plan := self._refine():
                yield seconds, order, plan
            elif seconds > GROWN * said:
                yield (said := seconds), (), None

    def glimpse(self) -> Plan | None:
        """The fastest plan that fits among the GLIMPSE most promising layouts. It need not be the best of all."""
        self._start()
        while self._heap and self.tried < GLIMPSE:
            if plan := self._refine():
                return plan
        plans = [what for *_, refine, what in self._heap if refine is None]
        return min(plans, key=lambda plan: plan.step.seconds, default=None)

    def _start(self) -> None:
        for number in range(len(self.space.families))[self.part]:
            self._push(self.bounds.family(self.space, number), Search._family, (number,), number)

    def _family(self, seconds: float, order: Order, number: int) -> None:
        ways = len(self.space.modes) * len(self.space.precisions)
        for index, (sizes, size, choice) in enumerate(self.bounds.starts(self.space, number)):
            if size <= self.most:
                place = number, index // ways, 0, index % ways
                self._push(max(seconds, sizes[0][0]), Search._sizes, place, (choice, sizes))
            else:
                self._lose(choice, len(self.space.microbatches(choice.layout)))

    def _lose(self, c: Choice, times: int = 1) -> None:
        self.lost += times * self.space.kinds(c.layout)

    def _refine(self) -> Plan | None:
        """Refines the entry with the lowest bound. Returns it if it is a full prediction."""
        seconds, _, order, refine, what = heapq.heappop(self._heap)
        self.looked += 1
        if refine is None:
            return what
        refine(self, seconds, order, what)
        return None

    def _push(
        self, seconds: float, refine: Refine | None, order: Order, what: Any, peak: float = 0.0
    ) -> None:
        if seconds < self.below:
            heapq.heappush(self._heap, (seconds, peak, order, refine, what))

    def _once(self, order: Order, bound: Callable[..., Any], *of: Any) -> Any:
        """A bound of an entry, which all searches of the space find once. bound: a method of a class, or `list` of
        several."""
        key = order, bound
        if key not in self._known:
            self._known[key] = bound(*of)
        return self._known[key]

    def _in_turn(self, seconds: float, refine: Refine, entries: Iterator[tuple[float, Order, Any]]) -> None:
        """Adds the first of these entries (bound, order, what), which has the lowest bound; when it is refined, the
        next."""
        for more, order, what in islice(entries, 1):

            def both(run: Search, seconds: float, order: Order, what: Any) -> None:
                run._in_turn(seconds, refine, entries)
                refine(run, seconds, order, what)

            self._push(max(seconds, more), both, order, what)

    def _sizes(self, seconds: float, order: Order, start: tuple[Choice, Sizes]) -> None:
        """A start with each size of a microbatch."""
        (*first, _, last), (c, sizes), space = order, start, self.space
        every = space.microbatches(c.layout)
        entries = ((more, (*first, n, last), space.choice(c.layout, every[n], c.mode)) for more, n in sizes)
        self._in_turn(seconds, Search._size, entries)

    def _size(self, seconds: float, order: Order, c: Choice) -> None:
        if self._once(order, LeastBytes.start, self.bounds.bytes, c, self.space) <= self.most:
            self._push(seconds, Search._shape, order, c)
        else:
            self._lose(c)

    def _shape(self, seconds: float, order: Order, c: Choice) -> None:
        bounds, space = self.bounds, self.space
        if self._once(order, LeastBytes.shape, bounds.bytes, c, space) <= self.most:
            more = 0.0  # where costs are exact, the entry has its bound since `Bounds.sizes`
            if not bounds.shared.exact:
                more = self._once(order, Bounds.shape, bounds, c, space)
            self._push(max(seconds, more), Search._schedules, order, c)
        else:
            self._lose(c)

    def _schedules(self, seconds: float, order: Order, c: Choice) -> None:
        ways = self.space.schedules(c.layout)
        every = self._once(order, Bounds.schedules, self.bounds, c, self.space)
        entries = ((more, (*order, n), changed(c, layout=changed(c.layout, **ways[n]))) for more, n in every)
        self._in_turn(seconds, Search._schedule, entries)

    def _schedule(self, seconds: float, order: Order, c: Choice) -> None:
        smallest = changed(c, layout=self.space.leanest(c.layout))
        if self._once(order, LeastBytes.of, self.bounds.bytes, smallest, False) <= self.most:
            more = self._once(order, Bounds.schedule, self.bounds, c, self.space)
            self._push(max(seconds, more), Search._sharings, order, c)
        else:
            self.lost += len(self.space.ways_to_share(c.layout))

    def _sharings(self, seconds: float, order: Order, c: Choice) -> None:
        every = [changed(c, layout=layout) for layout in self.space.sharings(c.layout)]
        sizes = self._once(order, list, map(self.bounds.bytes.of, every))
        for number, (one, size) in enumerate(zip(every, sizes, strict=True)):
            if size <= self.most:
                place = *order, number
                more = self._once(place, Bounds.sharing, self.bounds, one)
                self._push(max(seconds, more), Search._pipeline, place, one)
            else:
                self.lost += 1

    def _pipeline(self, seconds: float, order: Order, c: Choice) -> None:
        self._push(max(seconds, self.bounds.simulated(c)), Search._price, order, c)

    def _price(self, seconds: float, order: Order, c: Choice) -> None:
        self.tried += 1
        s, shared = self.bounds.setting(c), self.bounds.shared.operations(c)
        memory = held(s, shared.sums)
        if round(max(m.total for m in memory)) <= self.most:
            plan = Plan(s, memory, step(s, shared=shared.parts))
            self._push(plan.step.seconds, None, order, plan, plan.peak_bytes)
        else:
            self.lost += 1

    def by_bytes(self, most: float = math.inf) -> Iterator[tuple[float, float, Choice]]:
        """(bytes, a bound of those of all layouts to come, layout): layouts whose bound is at most `most`, those with
        the least bounds first."""
        space, least = self.space, self.bounds.bytes
        heap = list[tuple[float, tuple[int, ...], int, Choice]]()
        heap += (
            (least.least(c, space), (number,), -1, c) for number, c in enumerate(space.starts(space.shapes))
        )
        heapq.heapify(heap)
        while heap and heap[0][0] <= most:
            _, order, level, c = heapq.heappop(heap)
            found = list[tuple[float, Choice]]()
            if level == -1:
                found += ((least.start(one, space), one) for one in space.sizes(c))
            elif level == 0:
                found.append((least.shape(c, space), c))
            elif level == 1:
                lean = space.leanest(c.layout)
                for way in space.schedules(c.layout):
                    size = least.of(changed(c, layout=changed(lean, **way)), buffers=False)
                    found.append((size, changed(c, layout=changed(c.layout, **way))))
            elif level == 2:
                ones = (changed(c, layout=layout) for layout in space.sharings(c.layout))
                found += ((least.of(one), one) for one in ones)
            else:
                ranks = held(self.bounds.setting(c), self.bounds.shared.operations(c).sums)
                yield max(m.total for m in ranks), heap[0][0] if heap else math.inf, c
            for number, (size, one) in enumerate(found):
                heapq.heappush(heap, (size, (*order, number), level + 1, one))

    def smallest(self) -> tuple[Plan, bool]:
        """The layout with the least memory; True if no other has less, False if not all were counted that may."""
        counted, sure = list[tuple[float, Choice]](), False
        for size, rest, c in islice(self.by_bytes(), COUNTED):
            counted.append((size, c))
            if sure := min(counted, key=itemgetter(0))[0] <= rest:
                break
        return price(self.bounds.setting(min(counted, key=itemgetter(0))[1])), sure
