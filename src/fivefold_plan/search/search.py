"""Finds the valid layouts (`space.py`) that train a recipe fastest on a cluster, best first (`best_first.py`)."""

from __future__ import annotations

import gc
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, product
from typing import Any

from fivefold.errors import UserError
from fivefold.host.devices import GIB
from fivefold.recipe import Recipe, count_parameters
from fivefold.recipe.rules import with_layout
from fivefold.recipe.rules.combinations import PLAIN
from fivefold.schedules.pipeline import SCHEDULES
from fivefold.sharding.layout import Layout, to_text
from fivefold.sharding.tiers import BESIDE, EARLY, NOT_OFFLOADED, OFFLOADS, WINDOW
from fivefold_plan.advice.budget import DAY, Questions, answer
from fivefold_plan.advice.explain import Folded, fold, limits, margin, reasons
from fivefold_plan.cluster.devices import Cluster
from fivefold_plan.memory import model_states
from fivefold_plan.predict import Plan, for_recipe, limit, price, resolved, with_stalls
from fivefold_plan.predict import within as within_budget
from fivefold_plan.search.best_first import COUNTED, Search
from fivefold_plan.search.bound import Bounds
from fivefold_plan.search.halves import Halves, choice_of
from fivefold_plan.search.space import Choice, Space
from fivefold_plan.setting import Software, mode_of, software_of
from fivefold_plan.time import stage_costs

LOOKED, SLOWER = 32, 4 / 3  # plans whose recomputation is thinned out; a step with it beside one without
FOLDED = 4  # times as many are looked at, if many of them differ little
FEW = 4  # layouts per size of a microbatch that are tried with offload; pipelines of the second round
ROOMIER = 2  # times the memory that is looked beyond: devices have no more of it
ROOM = 1.25  # memory that the second round may save, beside what there is
MOST_SEARCHES = 16  # for the fewest devices, up to twice a bound of nodes, if these are many
REACH = 128  # nodes beyond the bound that are tried at least
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


@contextmanager
def _uncollected() -> Iterator[None]:
    """Python looks for no cycles. A search makes many objects and no cycles, and would spend a quarter of its time on
    looking, and a twentieth on looking once at its end."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            if not gc.get_freeze_count():  # nobody else's; then all becomes old without a look
                gc.freeze()
                gc.unfreeze()
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
    """The `top` fastest layouts that fit, into `most` bytes (then without bottlenecks) or the cluster's devices. The
    recipe's own layout and microbatches are ignored. modes: of precision, which it considers. None: the
    recipe's, and with `precision.mode = "auto"` all modes that this may stand for.

    Raises:
        UserError: the cluster has no number of devices, no layout is valid, or the device lacks the dtype.
    """
    space = space_of(recipe, cluster, modes)
    bounds = Bounds(space.recipe.model, cluster, for_recipe(software or software_of(cluster), recipe))
    run, room = Halves(space, bounds), limit(cluster) if most is None else most
    fitting, folded = list[Plan](), Folded()
    for plan in run.plans(room):
        fitting.append(plan)
        folded.add(plan)
        looked = len(fitting) >= LOOKED or plan.step.seconds > SLOWER * fitting[0].step.seconds
        if looked and (len(fitting) >= FOLDED * max(top, LOOKED) or len(folded.found) >= top):
            break
    best = fitting[0].step.seconds if fitting else math.inf
    roomy = run.glimpse(ROOM * room, best)
    late = fitting[-1].step.seconds if len(fitting) >= top else math.inf
    pipelines = [*filter(None, [roomy]), *islice((plan for plan in fitting if plan.layout.pp > 1), FEW)]
    second = list(tuned(space, bounds, room, late, pipelines))
    # recompute in as few blocks as it takes, not in all; no plan that is much slower becomes the first by that
    thinned = dict[tuple[Layout, int, str], Plan]()
    for plan in (*fitting, *second):
        plan = within_budget(plan, int(room))
        thinned.setdefault((plan.layout, plan.setting.sizes.B, plan.setting.mode), plan)
    plans, same = fold(sorted(thinned.values(), key=lambda plan: plan.step.seconds), top)
    counts = {"do not fit": run.lost, "as fast as one listed": sum(map(len, same))}
    considered = space.size + len(second)
    counts["slower"] = considered - len(plans) - sum(counts.values())
    rejected = {reason: n for reason, n in counts.items() if n}
    if not plans:
        plans, same = fold(offloaded(space, bounds), top)
        near = Search(space, bounds, room).smallest()
        binding, why = limits(plans, None, None, None), _nothing_fits(space, bounds, *near)
        return Found(plans, considered, rejected, same, reasons(plans), binding, why)

    def within(most: float) -> Plan | None:
        plan = next(run.plans(most), None)
        return plan and within_budget(plan, int(most))

    if most is not None:
        return Found(plans, considered, rejected, same, reasons(plans), within=within)
    best, whole, bolder = plans[0].step.seconds, limit(cluster, margin=False), plans[0]
    if whole > room:  # there is a margin
        wide = run.glimpse(whole, best) or bolder  # each takes a short search of its own
        bolder = min((within_budget(p, whole) for p in (bolder, wide)), key=lambda p: p.step.seconds)
    roomier = run.glimpse(ROOMIER * room, best)
    wider = run.glimpse(room, best, indivisible=True)
    binding = limits(plans, bolder, roomier, wider)
    return Found(plans, considered, rejected, same, reasons(plans), binding, "", within)


def tuned(
    space: Space, bounds: Bounds, most: float, late: float, pipelines: Sequence[Plan]
) -> Iterator[Plan]:
    """The second round: pipelines with ends without blocks; these and the pipelines themselves with other values of
    the fields that only some schedules take, and with the schedules that vary (`Generator.tries`). Those that fit into
    `most` bytes and are faster than `late` seconds."""
    tried, given = set[Choice](), [choice_of(plan) for plan in pipelines if plan.layout.pp > 1]

    def priced(c: Choice) -> Iterator[Plan]:
        if c not in tried and space.allows(c) and bounds.sharing(c) < late:
            tried.add(c)
            plan = price(bounds.setting(c), bounds.shared.operations(c).parts)
            if plan.peak_bytes <= most and plan.step.seconds < late:
                yield plan

    bare = [plan for c in given for x in space.bare(c.layout) for plan in priced(replace(c, layout=x))]
    yield from bare
    bare = sorted(bare, key=lambda plan: plan.step.seconds)[:FEW]
    for (name, made), c in product(SCHEDULES.items(), [*given, *map(choice_of, bare)]):
        if made.varies and not c.layout.bare_ends:
            c = replace(c, layout=replace(c.layout, schedule=name, virtual_stages=1))
        if c.layout.schedule != name or not space.allows(c):
            continue
        s, shared = bounds.setting(c), bounds.shared.operations(c).parts
        costs = stage_costs.of_longest(s, stage_costs.stage_costs(s, shared))
        for fields in made.tries(c.layout.pp, c.count, costs):
            yield from priced(replace(c, layout=replace(c.layout, **fields)))


def offloaded(space: Space, bounds: Bounds) -> list[Plan]:
    """The layouts, fastest first, that fit if they offload something, where none fits without. They are among those
    with the least bytes, and with the least seconds, for each size of a microbatch."""
    by_size: dict[int, list[Choice]] = {}
    for c in (one for start in space.starts(space.shapes) for one in space.sizes(start)):
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
    if needed <= software.step:  # no step takes less
        return None, 1
    node = replace(cluster, devices=each)
    least = Bounds(full.model, node, software).least(Space(full, node)) - software.step
    first = max(1, math.floor(least / (needed - software.step)))

    @_uncollected()
    def on(nodes: int) -> Plan | None:
        """The best plan on so many nodes, if it meets the deadline."""
        sized = replace(cluster, devices=nodes * each)
        with suppress(UserError):  # no layout divides the batch
            space, bounds = space_of(recipe, sized), Bounds(full.model, sized, software)
            if bounds.least(space) > needed:
                return None
            run = Search(space, bounds, limit(sized), SLOWER * needed)
            plans = [within_budget(plan, int(run.most)) for plan in islice(run.plans(), FEW)]
            best = min(plans, key=lambda plan: plan.step.seconds, default=None)
            if best and answer(best := with_stalls(best, recipe), asked)["days"] * DAY <= deadline:
                return best
        return None

    stride = 2 ** math.floor(math.log2(max(1, first // MOST_SEARCHES)))
    end = min(first + max(2 * first, REACH), MOST_DEVICES // each + 1)
    some = range(math.ceil(first / stride) * stride, end, stride)
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
