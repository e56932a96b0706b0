"""Finds the valid layouts (`space.py`) that train a recipe fastest on a cluster.

It is a best-first search on lower bounds (`bound.py`). It always refines the entry with the lowest bound: first a shape
with its microbatch, then with its traffic, with a schedule, with a sharding of states, and finally the full prediction.
A prediction that reaches the top is faster than everything left, because no bound exceeds its layout's prediction. So
the search is exact, and prices few layouts.
"""

from __future__ import annotations

import gc
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, product
from operator import itemgetter
from typing import Any

from fivefold.errors import UserError
from fivefold.host.devices import GIB
from fivefold.plan.advice.budget import DAY, Questions, answer
from fivefold.plan.advice.explain import Folded, fold, limits, margin, reasons
from fivefold.plan.cluster.devices import Cluster
from fivefold.plan.memory import model_states
from fivefold.plan.predict import Plan, for_recipe, held, limit, price, resolved, with_stalls
from fivefold.plan.predict import within as within_budget
from fivefold.plan.search.bound import Bounds, LeastBytes
from fivefold.plan.search.space import Choice, Space
from fivefold.plan.setting import Software, mode_of, software_of
from fivefold.plan.time import stage_costs
from fivefold.plan.time.time import step
from fivefold.recipe import Recipe, count_parameters
from fivefold.recipe.rules import with_layout
from fivefold.recipe.rules.combinations import PLAIN
from fivefold.schedules.pipeline import SCHEDULES
from fivefold.sharding.layout import Layout, changed, to_text
from fivefold.sharding.tiers import BESIDE, EARLY, NOT_OFFLOADED, OFFLOADS, WINDOW

GLIMPSE = 32
LOOKED, SLOWER = 32, 4 / 3  # plans whose recomputation is thinned out; a step with it beside one without
FOLDED = 4  # times as many are looked at, if many of them differ little
PRICED = 6  # the level of a full prediction, after six levels of bounds
Order = tuple[int, ...]
"""A layout's place in the space. The first of equal layouts wins, so that a search always gives the same result."""
FEW = 4  # layouts per size of a microbatch that are tried with offload; pipelines of the second round
ROOMIER = 2  # times the memory that is looked beyond: devices have no more of it
ROOM = 1.25  # memory that the second round may save, beside what there is
MOST_SEARCHES = 64  # for the fewest devices, between a bound and twice as many nodes
COUNTED = 100  # if nothing fits, the layouts that are counted exactly, of each number of devices
TRIED = 24  # numbers of devices between a bound and the first doubling that does
MOST_DEVICES = 2**17


@dataclass(frozen=True)
class Found:
    """The result of a search.

    plans: best first. rejected: number of rejected layouts by reason. same: for each plan, others that are as fast and
    differ little (`explain.fold`). reasons: why each plan is slower than the first. bottlenecks: those of the first,
    one sentence each. nothing: what would be needed if no layout fits; plans are then those that fit because they
    offload something. within: the fastest plan that takes at most the given bytes.
    """

    plans: list[Plan]
    considered: int
    rejected: dict[str, int]
    same: list[list[Plan]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    bottlenecks: list[str] = field(default_factory=list)
    nothing: str = ""
    within: Callable[[float], Plan | None] = lambda most: None

    def as_json(self) -> dict[str, Any]:
        plans = [plan.as_json() | {"lost": why} for plan, why in zip(self.plans, self.reasons, strict=True)]
        for plan, others in zip(plans, self.same, strict=True):
            plan["same"] = [to_text(other.layout) for other in others]
        return {
            "plans": plans,
            "considered": self.considered,
            "rejected": self.rejected,
            "binding": self.bottlenecks,
            "nothing": self.nothing,
        }


class Search:
    """A search for plans with at most `most` bytes and less than `below` seconds. lost: layouts that do not fit."""

    def __init__(self, space: Space, bounds: Bounds, most: float, below: float = math.inf):
        self.space, self.bounds, self.most, self.below = space, bounds, most, below
        self.lost = self.tried = 0
        self._heap: list[tuple[float, float, Order, int, Any]] = []
        self._known = bounds.known.setdefault(space, {})

    def plans(self) -> Iterator[Plan]:
        """Every plan that fits, fastest first. Among equally fast ones the smaller comes first."""
        self._start()
        while self._heap:
            if plan := self._refine():
                yield plan

    def glimpse(self) -> Plan | None:
        """The fastest plan that fits among the GLIMPSE most promising layouts. It need not be the best of all."""
        self._start()
        while self._heap and self.tried < GLIMPSE:
            if plan := self._refine():
                return plan
        plans = [what for *_, level, what in self._heap if level == PRICED]
        return min(plans, key=lambda plan: plan.step.seconds, default=None)

    def _start(self) -> None:
        ways = len(self.space.modes) * len(self.space.precisions)
        for number, (seconds, size, choice) in enumerate(self.bounds.starts(self.space)):
            if size <= self.most:
                self._push(seconds, 0, (number // ways, 0, number % ways), choice)
            else:
                self._lose(choice, len(self.space.microbatches(choice.layout)))

    def _lose(self, c: Choice, times: int = 1) -> None:
        self.lost += times * self.space.kinds(c.layout)

    def _refine(self) -> Plan | None:
        """Refines the entry with the lowest bound. Returns it if it is a full prediction."""
        seconds, _, order, level, what = heapq.heappop(self._heap)
        if level == PRICED:
            return what
        levels = (self._sizes, self._shape, self._schedules, self._sharings, self._pipeline, self._price)
        levels[level](seconds, order, what)
        return None

    def _push(self, seconds: float, level: int, order: Order, what: Any, peak: float = 0.0) -> None:
        if seconds < self.below:
            heapq.heappush(self._heap, (seconds, peak, order, level, what))

    def _once(self, order: Order, bound: Callable[..., float], *of: Any) -> float:
        """A bound of an entry, which all searches of the space find once. bound: a method of a class."""
        key = order, bound
        if key not in self._known:
            self._known[key] = bound(*of)
        return self._known[key]

    def _sizes(self, seconds: float, order: Order, c: Choice) -> None:
        """A choice with this size of a microbatch, and the next larger one, whose bound is no less."""
        first, index, last = order
        space, bounds, exact = self.space, self.bounds, self.bounds.shared.exact
        every = space.microbatches(c.layout)[index + 1 :]
        for number, B in enumerate(every if exact else every[:1], index + 1):
            one, place = space.choice(c.layout, B, c.mode), (first, number, last)
            more = self._once(place, Bounds.shape if exact else Bounds.start, bounds, one, space)
            self._push(more, int(exact), place, one)
        if self._once(order, LeastBytes.start, bounds.bytes, c, space) <= self.most:
            self._push(seconds, 1, order, c)
        else:
            self._lose(c)

    def _shape(self, seconds: float, order: Order, c: Choice) -> None:
        bounds, space = self.bounds, self.space
        if self._once(order, LeastBytes.shape, bounds.bytes, c, space) <= self.most:
            self._push(max(seconds, self._once(order, Bounds.shape, bounds, c, space)), 2, order, c)
        else:
            self._lose(c)

    def _schedules(self, seconds: float, order: Order, c: Choice) -> None:
        bounds, space, lean = self.bounds, self.space, self.space.leanest(c.layout)
        for number, way in enumerate(space.schedules(c.layout)):
            place = (*order, number)
            smallest = changed(c, layout=changed(lean, **way))
            if self._once(place, LeastBytes.of, bounds.bytes, smallest, False) > self.most:
                self.lost += len(space.ways_to_share(c.layout))
                continue
            one = changed(c, layout=changed(c.layout, **way))
            self._push(max(seconds, self._once(place, Bounds.schedule, bounds, one, space)), 3, place, one)

    def _sharings(self, seconds: float, order: Order, c: Choice) -> None:
        for number, layout in enumerate(self.space.sharings(c.layout)):
            one = changed(c, layout=layout)
            if self.bounds.bytes.of(one) <= self.most:
                self._push(max(seconds, self.bounds.sharing(one)), 4, (*order, number), one)
            else:
                self.lost += 1

    def _pipeline(self, seconds: float, order: Order, c: Choice) -> None:
        self._push(max(seconds, self.bounds.simulated(c)), 5, order, c)

    def _price(self, seconds: float, order: Order, c: Choice) -> None:
        self.tried += 1
        s, shared = self.bounds.setting(c), self.bounds.shared.operations(c)
        memory = held(s, shared.sums)
        if round(max(m.total for m in memory)) <= self.most:
            plan = Plan(s, memory, step(s, shared=shared.parts))
            self._push(plan.step.seconds, PRICED, order, plan, plan.peak_bytes)
        else:
            self.lost += 1

    def by_bytes(self, most: float = math.inf) -> Iterator[tuple[float, float, Choice]]:
        """(bytes, a bound of those of all layouts to come, layout): layouts whose bound is at most `most`, those with
        the least bounds first."""
        space, least = self.space, self.bounds.bytes
        heap = list[tuple[float, tuple[int, ...], int, Choice]]()
        heap += ((least.least(c, space), (number,), -1, c) for number, c in enumerate(space.starts()))
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


@contextmanager
def _uncollected() -> Iterator[None]:
    """Python looks for no cycles. A search makes many objects and no cycles, and would spend a quarter of its time on
    looking."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@_uncollected()
def search(
    recipe: Recipe,
    cluster: Cluster,
    top: int = 10,
    software: Software | None = None,
    modes: tuple[str, ...] = (),
    most: float | None = None,
) -> Found:
    """The `top` fastest layouts that fit, into `most` bytes (then without bottlenecks) or the cluster's devices.

    The search ignores the recipe's own layout and microbatches. modes: of precision, which it considers. None: the
    recipe's, and with `precision.mode = "auto"` all modes that this may stand for.

    Raises:
        UserError: the cluster has no number of devices, no layout is valid, or the device lacks the dtype.
    """
    space = space_of(recipe, cluster, modes)
    bounds = Bounds(space.recipe.model, cluster, for_recipe(software or software_of(cluster), recipe))
    run = Search(space, bounds, limit(cluster) if most is None else most)
    fitting, folded = list[Plan](), Folded()
    for plan in run.plans():
        fitting.append(plan)
        folded.add(plan)
        looked = len(fitting) >= LOOKED or plan.step.seconds > SLOWER * fitting[0].step.seconds
        if looked and (len(fitting) >= FOLDED * max(top, LOOKED) or len(folded.found) >= top):
            break
    best = fitting[0].step.seconds if fitting else math.inf
    roomy = Search(space, bounds, ROOM * run.most, best).glimpse()
    late = fitting[-1].step.seconds if len(fitting) >= top else math.inf
    pipelines = [*filter(None, [roomy]), *islice((plan for plan in fitting if plan.layout.pp > 1), FEW)]
    second = list(tuned(space, bounds, run.most, late, pipelines))
    # recompute in as few blocks as it takes, not in all; no plan that is much slower becomes the first by that
    thinned = dict[tuple[Layout, int, str], Plan]()
    for plan in (*fitting, *second):
        plan = within_budget(plan, int(run.most))
        thinned.setdefault((plan.layout, plan.setting.sizes.B, plan.setting.mode), plan)
    plans, same = fold(sorted(thinned.values(), key=lambda plan: plan.step.seconds), top)
    counts = {"do not fit": run.lost, "as fast as one listed": sum(map(len, same))}
    considered = space.size + len(second)
    counts["slower"] = considered - len(plans) - sum(counts.values())
    rejected = {reason: n for reason, n in counts.items() if n}
    if not plans:
        plans, same = fold(offloaded(space, bounds), top)
        binding, why = limits(plans, None, None, None), _nothing_fits(space, bounds, *run.smallest())
        return Found(plans, considered, rejected, same, reasons(plans), binding, why)

    def within(most: float) -> Plan | None:
        plan = next(Search(space, bounds, most).plans(), None)
        return plan and within_budget(plan, int(most))

    if most is not None:
        return Found(plans, considered, rejected, same, reasons(plans), within=within)
    best, whole, bolder = plans[0].step.seconds, limit(cluster, margin=False), plans[0]
    if whole > run.most:  # there is a margin
        wide = Search(space, bounds, whole, best).glimpse() or bolder  # each takes a short search of its own
        bolder = min((within_budget(p, whole) for p in (bolder, wide)), key=lambda p: p.step.seconds)
    roomier = Search(space, bounds, ROOMIER * run.most, best).glimpse()
    wider = Search(replace(space, indivisible=True), bounds, run.most, best).glimpse()
    binding = limits(plans, bolder, roomier, wider)
    return Found(plans, considered, rejected, same, reasons(plans), binding, "", within)


def tuned(
    space: Space, bounds: Bounds, most: float, late: float, pipelines: Sequence[Plan]
) -> Iterator[Plan]:
    """The second round: pipelines with ends without blocks; these and the pipelines themselves with other values of
    the fields that only some schedules take, and with the schedules that vary (`Generator.tries`). Those that fit into
    `most` bytes and are faster than `late` seconds."""
    tried, given = set[Choice](), [_choice(plan) for plan in pipelines if plan.layout.pp > 1]

    def priced(c: Choice) -> Iterator[Plan]:
        if c not in tried and space.allows(c) and bounds.sharing(c) < late:
            tried.add(c)
            plan = price(bounds.setting(c), bounds.shared.operations(c).parts)
            if plan.peak_bytes <= most and plan.step.seconds < late:
                yield plan

    bare = [plan for c in given for x in space.bare(c.layout) for plan in priced(replace(c, layout=x))]
    yield from bare
    bare = sorted(bare, key=lambda plan: plan.step.seconds)[:FEW]
    for (name, made), c in product(SCHEDULES.items(), [*given, *map(_choice, bare)]):
        if made.varies and not c.layout.bare_ends:
            c = replace(c, layout=replace(c.layout, schedule=name, virtual_stages=1))
        if c.layout.schedule != name or not space.allows(c):
            continue
        s, shared = bounds.setting(c), bounds.shared.operations(c).parts
        costs = stage_costs.of_longest(s, stage_costs.stage_costs(s, shared))
        for fields in made.tries(c.layout.pp, c.count, costs):
            yield from priced(replace(c, layout=replace(c.layout, **fields)))


def _choice(plan: Plan) -> Choice:
    s = plan.setting
    return Choice(s.layout, s.sizes.B, s.microbatches, s.mode, s.sequences)


def offloaded(space: Space, bounds: Bounds) -> list[Plan]:
    """The layouts, fastest first, that fit if they offload something, where none fits without. They are among those
    with the least bytes, and with the least seconds, for each size of a microbatch."""
    by_size: dict[int, list[Choice]] = {}
    for c in (one for start in space.starts() for one in space.sizes(start)):
        by_size.setdefault(c.B, []).append(c)
    found = []
    for starts in by_size.values():
        light = heapq.nsmallest(FEW, starts, key=partial(bounds.bytes.light, space=space))
        least = (*islice(bounds.fastest(starts, space), FEW), *light)
        for c in dict.fromkeys(least):
            schedules = space.schedules(c.layout)[:FEW]
            for layout in dict.fromkeys((c.layout, space.leanest(c.layout))):
                for way, offload, update in product(schedules, OFFLOADS, (BESIDE, EARLY)):
                    window = 0 if OFFLOADS[offload].working != "device" else WINDOW
                    how = {"offload": offload, "offload_update": update, "offload_window": window}
                    one = replace(c, layout=replace(layout, **way, **how))
                    other = offload != NOT_OFFLOADED and one.layout.early == (update == EARLY)
                    if other and space.allows(one):
                        found.append(price(bounds.setting(one)))
    return sorted((plan for plan in found if plan.fits), key=lambda plan: plan.step.seconds)


def fewest_devices(
    recipe: Recipe, cluster: Cluster, asked: Questions, software: Software | None = None
) -> tuple[Plan | None, int]:
    """(the best plan on the fewest whole nodes that meet the deadline, or None; the step between the numbers of nodes
    that were tried). They begin at a bound: nodes that compute as fast as one alone, and wait for nothing. A plan on
    more nodes may be slower, so once a number meets the deadline all smaller ones are tried, too."""
    full, each, deadline = resolved(recipe), cluster.per_node, asked.deadline
    assert deadline is not None
    software = for_recipe(software or software_of(cluster), recipe)
    tokens = full.train.global_batch_size * full.model.seq_len
    needed = deadline / (asked.tokens / tokens)
    node = replace(cluster, devices=each)
    alone = Bounds(full.model, node, software).starts(Space(full, node))
    least = min((seconds for seconds, _, _ in alone), default=0.0) - software.step
    first = max(1, math.floor(least / needed))

    @_uncollected()
    def on(nodes: int) -> Plan | None:
        """The best plan on so many nodes, if it meets the deadline."""
        sized = replace(cluster, devices=nodes * each)
        with suppress(UserError):  # no layout divides the batch
            space, bounds = space_of(recipe, sized), Bounds(full.model, sized, software)
            if all(seconds > needed for seconds, _, _ in bounds.starts(space)):
                return None
            run = Search(space, bounds, limit(sized), SLOWER * needed)
            plans = [within_budget(plan, int(run.most)) for plan in islice(run.plans(), FEW)]
            best = min(plans, key=lambda plan: plan.step.seconds, default=None)
            if best and answer(best := with_stalls(best, recipe), asked)["days"] * DAY <= deadline:
                return best
        return None

    stride = 2 ** math.floor(math.log2(max(1, first // MOST_SEARCHES)))
    some = range(math.ceil(first / stride) * stride, first + 2 * max(first, MOST_SEARCHES), stride)
    found = next(filter(None, map(on, some)), None)
    if found is None:
        return None, stride
    smaller = (nodes for nodes in range(first, found.layout.ranks // each) if nodes % stride)
    return next(filter(None, map(on, smaller)), found), 1


def space_of(recipe: Recipe, cluster: Cluster, modes: tuple[str, ...] = ()) -> Space:
    """The valid layouts to search. modes: see `search`.

    Raises:
        UserError: there are none.
    """
    if not cluster.devices:
        raise UserError(
            f"cluster '{cluster.name}': a search needs a number of devices, such as {cluster.name}:64"
        )
    if recipe.replica_groups.count > 1 or recipe.sync.method != PLAIN.sync.method:
        raise UserError(
            f'a search compares layouts that train the same; with sync.method = "{recipe.sync.method}" the number of '
            "replica groups changes it. Plan one layout at a time, or search with --set sync.method=all"
        )
    mode_of(recipe.precision.mode, cluster)
    asked = tuple(dict.fromkeys(mode_of(mode, cluster) for mode in modes))
    space = Space(resolved(recipe), cluster, asked=asked)
    if not space.size:
        devices, batch = cluster.devices, space.batch
        least = min(devices // way.tp // way.cp // pp for way in space.ways() for pp in space.stages(way))
        raise UserError(
            f"no layout of {devices} devices has a sequence of train.global_batch_size = {batch} for each "
            f"data-parallel rank. Nearest valid: train.global_batch_size = {least}, or {cluster.name}:{batch}"
        )
    return space


def apply(recipe: Recipe, plan: Plan) -> Recipe:
    """The recipe with the plan's layout, microbatch size and precision mode."""
    s = plan.setting
    changed = with_layout(recipe, plan.layout, microbatch_size=s.sizes.B)
    precision = changed.precision.model_copy(update={"mode": s.mode})
    return changed.model_copy(update={"precision": precision})


def _nothing_fits(space: Space, bounds: Bounds, near: Plan, known: bool) -> str:
    """The message for layouts that do not fit: memory of the smallest (known: no other has less), and a number of
    devices that is enough."""
    cluster, most, s = space.cluster, limit(space.cluster), near.setting
    if most <= 0:
        return (
            f"no layout fits: a device of {cluster.name} has {cluster.device.memory / GIB:.2f} GiB, and "
            f"the runtime takes {cluster.device.reserve / GIB:.1f} GiB"
        )
    smallest = (
        f"no layout fits: the smallest {'' if known else 'found '}of {space.size}, "
        f"{to_text(near.layout)} with microbatches of {s.sizes.B} in "
        f"{s.mode}, needs {near.peak_bytes / GIB:.1f} GiB of {most / GIB:.1f} GiB per device. "
    )
    if near.peak_bytes <= limit(cluster, margin=False):
        return f"{smallest}It fits without {margin(cluster)} (--margin 0)"
    by_mode = bounds.software.states
    states = min(sum(model_states.state_bytes(by_mode[mode], 3, 1.0, 1.0)) for mode in space.precisions)
    least = math.ceil(states * count_parameters(space.recipe.model) / most)
    sure = True  # that no smaller number is enough
    for number, devices in enumerate(_numbers(max(least, cluster.devices + 1), cluster.per_node)):
        larger = replace(space, cluster=replace(cluster, devices=devices))
        counted = Search(larger, bounds, most).by_bytes(most)
        for size, _, c in islice(counted, COUNTED):
            if size <= most:
                fewer = "" if sure and number < TRIED else ", if not fewer"
                return f"{smallest}{cluster.name}:{devices} would be enough{fewer} ({to_text(c.layout)})"
        sure = sure and next(counted, None) is None
    many = f"No tried number of devices up to {MOST_DEVICES} is enough: the batch or the blocks are too large"
    return smallest + many


def _numbers(first: int, per_node: int) -> Iterator[int]:
    """Numbers of devices to try: every number within a node, then whole nodes, then doublings."""
    devices = first
    for _ in range(TRIED):
        yield devices
        devices = devices + 1 if devices < per_node else (devices // per_node + 1) * per_node
    devices = 2 ** math.ceil(math.log2(devices))
    while devices <= MOST_DEVICES:
        yield devices
        devices *= 2


def frontier(found: Found) -> list[Plan]:
    """The fastest layout for each memory size, from the least memory to the most: no other beats them in both.

    It starts with the best plan. Each next one is the fastest that takes less memory, by at least 1/32 of the best
    plan's.
    """
    plans = found.plans[:1]
    gap = plans[0].peak_bytes / 32 if plans else 0
    while plans and (following := found.within(plans[-1].peak_bytes - gap)):
        plans.append(following)
    return plans[::-1]
