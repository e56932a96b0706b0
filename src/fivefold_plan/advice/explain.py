"""What a plan says for people: a summary, every term for `--explain`, why other plans are slower than a search's best,
which bottlenecks the best one has, and changes of a recipe that need less memory.

Bottlenecks and changes are found by pricing a plan again with one thing changed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from fivefold.errors import UserError, several
from fivefold.host.devices import GIB
from fivefold.models.operations import Operation
from fivefold.observe.format import memory_text, short_number, size
from fivefold.recipe import Recipe, change
from fivefold.schedules.pipeline import SCHEDULES
from fivefold.schedules.timelines import CATEGORIES
from fivefold.sharding.layout import Layout, describe, divisors, to_text
from fivefold.sharding.parts import stages_of
from fivefold.sharding.tiers import NOT_OFFLOADED, OFFLOADS
from fivefold_plan.cluster.devices import MARGIN, Cluster, Link
from fivefold_plan.memory import memory, model_states
from fivefold_plan.messages import volume
from fivefold_plan.predict import FRAGMENTS, Plan, limit, predict, price
from fivefold_plan.setting import Setting, Software
from fivefold_plan.time import stage_costs
from fivefold_plan.time.cost import operation
from fivefold_plan.time.offload import EXPOSED

AWAY = {"host": "in host memory", "disk": "on disk"}
LESS = 0.98  # a change counts if it needs less than this share of the memory
LARGE_BATCH = 64e6  # tokens of a step; published runs have up to 63M (DeepSeek-V3)
WORTH = 0.001  # a smaller share is not mentioned
SMALLER = 1 / 32  # of the memory: a plan that saves less counts as no smaller
EXPOSED_AS = {
    "model": "communication within the model",
    "data": "gradient sums",
    "replica_groups": "outer steps",
    EXPOSED: "waits for offload",
}
"""What the seconds of `Step.exposed` are called."""


def summary(plan: Plan) -> list[str]:
    """The prediction in a few lines."""
    step, s = plan.step, plan.setting
    worst = max(range(len(plan.memory)), key=lambda i: plan.memory[i].total)
    room = f"{plan.peak_bytes / GIB:.1f} GiB of {plan.limit / GIB:.1f} GiB"
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    if plan.limit < plan.peak_bytes <= limit(s.cluster, margin=False):
        verdict += f"; it does without {margin(s.cluster)} (--margin 0)"
    usual = (1 - MARGIN) * limit(s.cluster, margin=False)
    if plan.fits and plan.peak_bytes > usual and not s.cluster.on_cpu:
        verdict += f", near the limit (the usual margin is {MARGIN:.0%}): a full allocator slows steps down"
    shares = [
        (name, seconds / step.seconds)
        for name, seconds in (
            ("compute", step.compute),
            ("exposed communication", sum(step.exposed.values()) - step.exposed.get(EXPOSED, 0.0)),
            *([("waits for offload", step.exposed[EXPOSED])] if EXPOSED in step.exposed else []),
            ("bubble", step.bubble),
        )
    ]
    servers = f" as workers, and {several(plan.service.servers.count, 'server')}" if plan.service else ""
    lines = [
        f"layout        {describe(plan.layout)}{servers}",
        f"microbatches  {s.microbatches} of {several(s.sizes.B, 'sequence')}, {s.mode} on {s.cluster.name}",
        f"memory        {room} on {plan.place(worst)}: {verdict}",
        f"step          {step.seconds:.4g} s: " + ", ".join(f"{name} {100 * x:.1f}%" for name, x in shares),
        f"speed         {plan.tokens_per_s:,.0f} tokens/s, {plan.tokens_per_s / plan.ranks:,.0f} per device, "
        f"{plan.model_flops_per_gpu / 1e12:.3g} TFLOP/s per device, MFU {100 * plan.mfu:.1f}%, "
        f"HFU {100 * plan.hfu:.1f}%",
    ]
    if plan.attention:
        lines.append(f"attention     {plan.attention}")
    away = [(tier, max(getattr(one, tier) for one in plan.memory)) for tier in ("host", "disk")]
    if offloaded := [f"{memory_text(most)} per rank {AWAY[tier]}" for tier, most in away if most]:
        lines.insert(3, f"offloaded     {', '.join(offloaded)}")
    if plan.tokens > LARGE_BATCH:
        batch = f"{short_number(plan.tokens)} tokens per step: train.global_batch_size counts sequences"
        lines.append(f"batch         {batch}, here of {s.model.seq_len:,} tokens")
    sent = ", ".join(f"{axis} {size(bytes)}" for axis, bytes in plan.sent.items())
    if plan.slow_links:
        lines.append(f"groups        {plan.slow_links.line(s.replica_groups.count, s.replica_groups.every)}")
    return [*lines, f"sent per step {sent or 'nothing'} (the rank that sends most)"]


def margin(cluster: Cluster) -> str:
    """What plans leave free of a device's memory, in words."""
    return f"the margin of {100 * cluster.device.margin:.3g}%"


def explain(plan: Plan) -> list[str]:
    """Every term: memory of each stage, operations of a block, messages by kind, parts of the step."""
    s, step = plan.setting, plan.step
    lines = [*_memory(plan), "", *_operations(plan), ""]
    if not plan.service:
        lines.append("messages of rank 0 per step (bytes of the larger of input and output)")
        for (what, axis), (calls, size) in sorted(volume.counted(s).items()):
            lines.append(f"  {what:16}{axis:15}{calls:9,} calls {size / 2**20:14,.1f} MiB")
        lines.append("")
    lines.append(f"step, s ({s.microbatches} microbatches, schedule {s.layout.schedule})")
    exposed = ((f"exposed communication: {name}", seconds) for name, seconds in step.exposed.items())
    for name, seconds in (*step.terms, *exposed, ("bubble", step.bubble), ("step", step.seconds)):
        lines.append(f"  {name:38}{seconds:10.4f}")
    if "zb_costs" in SCHEDULES[s.layout.schedule].takes and s.layout.pp > 1:
        words = stage_costs.of_longest(s, step.costs)
        lines.append(f"  F:I:W:transfer of the longest stage     {words} (layout.zb_costs)")
    return [*lines, "", *plan.stalls.lines()] if plan.stalls else lines


def _memory(plan: Plan) -> Iterator[str]:
    names = (*CATEGORIES, "total")
    yield "memory, GiB    " + "".join(f"{name:>12}" for name in names)
    for position, held in enumerate(plan.memory):
        name = plan.place(position).removeprefix("the ranks of ").removeprefix("a ")
        yield f"  {name:<13}" + "".join(f"{getattr(held, name) / GIB:12.3f}" for name in names)
    cluster, device = plan.setting.cluster, plan.setting.cluster.device
    b, ranks = plan.setting.states, model_states.rank_elements(plan.setting)
    yield (
        f"  bytes per parameter: weights {b.working:g}, gradients {b.gradient:g}, masters {b.master:g}, moments "
        f"{b.moments:g}; ZeRO {plan.layout.zero}; elements of stage 0: {ranks[0].computes:,.0f} computed with, "
        f"{ranks[0].keeps:,.0f} stored"
    )
    yield (
        f"  {device.memory / GIB:.1f} GiB per device; {plan.limit / GIB:.1f} GiB are left after "
        f"{device.reserve / GIB:.2g} GiB for the runtime, {FRAGMENTS:.0%} for fragments, and {margin(cluster)}"
    )
    for mode in sorted(set(plan.setting.recompute)):
        yield f"  activations of a block, MiB, recompute {mode}: " + ", ".join(
            f"{saved.name} {saved.size / 2**20:.1f}"
            for op in plan.setting.last_block
            for saved in op.saved
            if memory.kept([Operation(op.name, saved=(saved,))], mode, plan.setting.software)
        )


def _operations(plan: Plan) -> Iterator[str]:
    s, ms = plan.setting, 1e3
    yield "operations, ms            forward   d input  d weight  messages  what"
    for where, ops in (("begin", s.work.begin), ("block", s.last_block), ("end", s.work.end)):
        for op in ops:
            c, p = operation(op, s), op.matmul
            what = f"{p.count:g} x ({p.m:g}, {p.k:g}) ({p.k:g}, {p.n:g})" if p else ""
            if op.attention:
                what = f"{op.attention / 1e9:.4g} GFLOP forward"
            elif not p:
                what = f"{op.forward / 2**20:.1f} + {op.backward / 2**20:.1f} MiB moved"
            yield (
                f"  {where:6}{op.name:16}{c.forward * ms:9.3f} {c.input * ms:9.3f} {c.weight * ms:9.3f} "
                f"{c.sent * ms:9.3f}  {what}"
            )
    if s.card.has_experts:
        load = s.software.expert_load
        assumed = " (assumed; set it with --expert-load)" if load == 1 else ""
        yield f"  load of the busiest expert rank relative to an even split: {load:g}{assumed}"


class Folded:
    """Plans that come best first. found: those listed; same: for each those behind it that are as fast, take no less
    memory, and differ only in how sequences are dealt to data-parallel and context ranks, and in the states that these
    share."""

    def __init__(self, plans: Iterable[Plan] = ()):
        self.found, self.same = list[Plan](), list[list[Plan]]()
        self._alike = dict[object, list[tuple[Plan, list[Plan]]]]()
        for plan in plans:
            self.add(plan)

    def add(self, plan: Plan) -> None:
        s, x = plan.setting, plan.setting.layout
        groups = self._alike.setdefault((_undealt(x), x.dp * x.cp, s.sizes.B / x.cp, s.mode), [])
        for first, others in groups:
            slower = plan.step.seconds > (1 + WORTH) * first.step.seconds
            if not slower and plan.peak_bytes >= (1 - SMALLER) * first.peak_bytes:
                others.append(plan)
                return
        self.found.append(plan)
        self.same.append([])
        groups.append((plan, self.same[-1]))


def fold(plans: Sequence[Plan], top: int | None = None) -> tuple[list[Plan], list[list[Plan]]]:
    """(the first `top` plans that `Folded` lists, the others of each)."""
    folded = Folded(plans)
    return folded.found[:top], folded.same[:top]


@lru_cache(maxsize=1024)
def _undealt(layout: Layout) -> Layout:
    """What layouts have in common that differ only so."""
    alone = {"dp_replicate": 1, "dp_shard": 1, "zero": 0, "cp": 1, "cp_method": Layout.cp_method}
    return replace(layout, **alone, sp_regather=False)


def reasons(plans: Sequence[Plan]) -> list[str]:
    """For each plan, the largest reason why it is slower than the best, as a share of the best's step ('' for it)."""
    if not plans:
        return []
    texts, best, parts = [""], plans[0], _parts(plans[0])
    for plan in plans[1:]:
        more = {name: seconds - parts[name] for name, seconds in _parts(plan).items()}
        name = max(more, key=lambda key: more[key])
        slower = f"{name} +{100 * more[name] / best.step.seconds:.1f}%"
        alike = f"as fast, {(plan.peak_bytes - best.peak_bytes) / GIB:+.1f} GiB"
        texts.append(slower if plan.step.seconds >= (1 + WORTH) * best.step.seconds else alike)
    return texts


def _parts(plan: Plan) -> dict[str, float]:
    """Seconds of the step by cause. They add up to the step."""
    s, step = plan.setting, plan.step
    worst, even = _computing(s)
    once, _ = _computing(replace(s, layout=replace(s.layout, recompute="none")))
    again, uneven = worst - once, worst - even
    return {
        "bubble": step.bubble,
        **{name: step.exposed.get(key, 0.0) for key, name in EXPOSED_AS.items()},
        "recomputation": again,
        "uneven stages": uneven,
        "matmuls, memory and optimizer": step.compute - again - uneven,
    }


def _computing(s: Setting) -> tuple[float, float]:
    """Seconds per step that the busiest pipeline rank computes, and the average over all."""
    costs = stage_costs.stage_costs(s)
    sums = [
        s.microbatches
        * sum(costs[stage].seconds - costs[stage].sent for stage in stages_of(s.layout, position))
        for position in range(s.layout.pp)
    ]
    return max(sums), sum(sums) / len(sums)


def limits(
    plans: Sequence[Plan], bolder: Plan | None, roomier: Plan | None, indivisible: Plan | None
) -> list[str]:
    """The bottlenecks of the best plan, worst first, with the gain in tokens/s from more of each.

    bolder: a fast plan that fits without the margin. roomier: one that needs more memory. indivisible: a plan whose
    tensor ranks need not divide the model. For links, devices and batch the given plans are priced again, so another
    layout may gain more: the sentences say so.
    """
    if not plans:
        return []
    best, more = plans[0], list[tuple[Plan, str]]()
    if bolder is not None:
        fits = f"fits without {margin(best.setting.cluster)} (--margin 0), with {bolder.peak_bytes / GIB:.1f} GiB"
        more.append((bolder, f"margin: {_how(bolder)} would be {{}} faster; it {fits}"))
    if roomier is not None:
        room = f"{roomier.peak_bytes / GIB:.1f} of {best.limit / GIB:.1f} GiB"
        more.append((roomier, f"memory: {_how(roomier)} would be {{}} faster, but takes {room}"))
    if indivisible is not None:
        why = f"but tp={indivisible.layout.tp} does not divide the model"
        more.append((indivisible, f"divisibility: {_how(indivisible)} would be {{}} faster, {why}"))
    batch = "batch size: twice train.global_batch_size would give {} more tokens/s with this layout"
    more.append((price(replace(best.setting, microbatches=2 * best.setting.microbatches)), batch))
    cluster, device = best.setting.cluster, best.setting.cluster.device
    computes = replace(device, peak={dtype: 2 * rate for dtype, rate in device.peak.items()})
    moves = replace(device, bandwidth=2 * device.bandwidth)
    doubled = {
        "links within a node: twice the speed": replace(cluster, intra=_twice(cluster.intra)),
        "network between nodes: twice the speed": replace(cluster, inter=_twice(cluster.inter)),
        "compute: devices with twice the FLOP/s": replace(cluster, device=computes),
        "memory bandwidth: twice as much": replace(cluster, device=moves),
    }
    if EXPOSED in best.step.exposed:
        host, disk = cluster.host_link.shared(0.5), cluster.storage.shared(0.5)  # twice the speed
        doubled["link to the host: twice the speed"] = replace(cluster, host_link=host)
        doubled["disk: twice the speed"] = replace(cluster, storage=disk)
    for what, cluster in doubled.items():
        again = [price(replace(plan.setting, cluster=cluster)) for plan in plans]
        faster = min(again, key=lambda plan: plan.step.seconds)
        more.append((faster, f"{what} would give {{}} more tokens/s with a layout listed here"))
    gains = [(plan.tokens_per_s / best.tokens_per_s - 1, text) for plan, text in more]
    gains.sort(key=lambda pair: -pair[0])
    return [text.format(f"{100 * gain:.1f}%") for gain, text in gains if gain >= WORTH]


def _how(plan: Plan) -> str:
    s = plan.setting
    return f"{to_text(plan.layout)} with microbatches of {s.sizes.B}"


def _twice(link: Link) -> Link:
    reduce = 2 * link.reduce if link.reduce else None
    return replace(link, bandwidth=2 * link.bandwidth, latency=link.latency / 2, reduce=reduce)


@dataclass(frozen=True)
class Remedy:
    """One change. sets, layout: the options that make it. peak: predicted bytes of tensors on the rank with most.
    slower: the predicted step beside the recipe's own, 1 if it is as fast."""

    sets: tuple[str, ...]
    peak: int
    slower: float
    layout: str = ""

    def rank(self, room: float) -> tuple[bool, float]:
        """Those that fit into `room` bytes come first, the fastest before; then those that need least."""
        return self.peak > room, self.peak if self.peak > room else self.slower

    @property
    def options(self) -> str:
        layout = ["--layout", self.layout] if self.layout else []
        return shlex.join([*layout, *(word for one in self.sets for word in ("--set", one))])


def remedies(
    recipe: Recipe, cluster: Cluster, software: Software, room: float, gpu: bool, count: int = 3
) -> tuple[Plan, list[Remedy]]:
    """(the plan of a resolved recipe, the `count` changes that are nearest to it). Those come first that fit into
    `room` bytes, fastest first; then those that need least. One of each kind, and all together if none fits alone. gpu:
    the memory that ran out is a GPU's. Raises UserError: the planner cannot predict the recipe."""
    cluster = replace(cluster, devices=None)
    now = predict(recipe, cluster, software)

    def of(sets: Sequence[str]) -> Remedy | None:
        with suppress(UserError):
            plan = predict(change(recipe, list(sets)), cluster, software)
            if plan.peak_bytes < LESS * now.peak_bytes:
                return Remedy(tuple(sets), plan.peak_bytes, plan.step.seconds / now.step.seconds)
        return None

    rank = partial(Remedy.rank, room=room)
    kinds = [sorted(filter(None, map(of, kind)), key=rank) for kind in _kinds(recipe, room, gpu)]
    best = [found[0] for found in kinds if found]
    if all(one.peak > room for one in best) and (all_of_them := of([one for r in best for one in r.sets])):
        best.append(all_of_them)
    best.sort(key=rank)
    others = sorted((one for found in kinds for one in found[1:]), key=rank)
    return now, [*best, *others][:count]


def _kinds(recipe: Recipe, room: float, gpu: bool) -> Iterator[list[list[str]]]:
    """Changes by kind: microbatches, recomputation, ZeRO, offload."""
    train, layout = recipe.train, Layout.from_recipe(recipe.layout)
    B = train.microbatch_size or 1
    yield [[f"train.microbatch_size={size}"] for size in divisors(B) if size < B]
    modes = ["full", "ops:attention+gate+norm"]
    if room > 0 and not recipe.servers.count:
        modes.append(f"budget:{int(room / 2**20)}MiB")
    yield [[f"layout.recompute={mode}"] for mode in modes if mode != layout.recompute]
    if layout.dp > 1 and not recipe.servers.count:
        all_of_them = ["layout.dp_replicate=1", f"layout.dp_shard={layout.dp}"]
        yield [[*all_of_them, f"layout.zero={zero}"] for zero in range(1, 4) if zero > layout.zero]
    if layout.offload == NOT_OFFLOADED:
        # On CPUs host memory is the memory that ran out.
        yield [
            [f"layout.offload={how}"]
            for how, away in OFFLOADS.items()
            if away.disk or (how != NOT_OFFLOADED and (gpu or away.stays))
        ]
