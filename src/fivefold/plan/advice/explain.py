"""Prints a prediction: a summary, and every term for `--explain`."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.errors import several
from fivefold.host.devices import GIB
from fivefold.models.operations import Operation
from fivefold.plan.memory import model_states, operations
from fivefold.plan.messages import volume
from fivefold.plan.predict import Plan
from fivefold.plan.time.cost import operation
from fivefold.plan.time.offload import EXPOSED
from fivefold.schedules.timelines import CATEGORIES
from fivefold.sharding.layout_text import describe

AWAY = {"host": "in host memory", "disk": "on disk"}


def summary(plan: Plan) -> list[str]:
    """The prediction in a few lines."""
    step, s = plan.step, plan.setting
    worst = max(range(len(plan.memory)), key=lambda i: plan.memory[i].total)
    room = f"{plan.peak_bytes / GIB:.1f} GiB of {plan.limit / GIB:.1f} GiB"
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
        f"memory        {room} on {plan.place(worst)}: {'fits' if plan.fits else 'DOES NOT FIT'}",
        f"step          {step.seconds:.4g} s: " + ", ".join(f"{name} {100 * x:.1f}%" for name, x in shares),
        f"speed         {plan.tokens_per_s:,.0f} tokens/s, {plan.tokens_per_s / plan.ranks:,.0f} per device, "
        f"{plan.model_flops_per_gpu / 1e12:.3g} TFLOP/s per device, MFU {100 * plan.mfu:.1f}%, "
        f"HFU {100 * plan.hfu:.1f}%",
    ]
    if plan.attention:
        lines.append(f"attention     {plan.attention}")
    away = [(tier, max(getattr(one, tier) for one in plan.memory)) for tier in ("host", "disk")]
    if offloaded := [f"{size / GIB:.1f} GiB per rank {AWAY[tier]}" for tier, size in away if size]:
        lines.insert(3, f"offloaded     {', '.join(offloaded)}")
    sent = ", ".join(f"{axis} {size / GIB:.3g} GiB" for axis, size in plan.sent.items())
    if plan.slow_links:
        lines.append(f"sites         {plan.slow_links.line(s.sites.count, s.sites.every)}")
    return [*lines, f"sent per step {sent or 'nothing'} (the rank that sends most)"]


def explain(plan: Plan) -> list[str]:
    """Every term: memory of each stage, operations of a block, messages by kind, parts of the step."""
    stalls = ["", *plan.stalls.lines()] if plan.stalls else []
    sent = [] if plan.service else [*_messages(plan), ""]
    return [*_memory(plan), "", *_operations(plan), "", *sent, *_step(plan), *stalls]


def _memory(plan: Plan) -> Iterator[str]:
    names = (*CATEGORIES, "total")
    yield "memory, GiB    " + "".join(f"{name:>12}" for name in names)
    for position, held in enumerate(plan.memory):
        name = plan.place(position).removeprefix("the ranks of ").removeprefix("a ")
        yield f"  {name:<13}" + "".join(f"{getattr(held, name) / GIB:12.3f}" for name in names)
    device = plan.setting.cluster.device
    b, ranks = plan.setting.states, model_states.rank_elements(plan.setting)
    yield (
        f"  bytes per parameter: weights {b.working:g}, gradients {b.gradient:g}, masters {b.master:g}, moments "
        f"{b.moments:g}; ZeRO {plan.layout.zero}; elements of stage 0: {ranks[0].computes:,.0f} computed with, "
        f"{ranks[0].keeps:,.0f} stored"
    )
    yield (
        f"  {device.memory / GIB:.1f} GiB per device; {plan.limit / GIB:.1f} GiB are left after "
        f"{device.reserve / GIB:.2g} GiB for the runtime, and allocator losses"
    )
    for mode in sorted(set(plan.setting.recompute)):
        yield f"  activations of a block, MiB, recompute {mode}: " + ", ".join(
            f"{saved.name} {saved.size / 2**20:.1f}"
            for op in _block(plan)
            for saved in op.saved
            if operations.kept([Operation(op.name, saved=(saved,))], mode, plan.setting.software)
        )


def _block(plan: Plan) -> list[Operation]:
    """The operations of a block; with experts, if the model has any."""
    return plan.setting.work.block[any(plan.setting.card.mixed)]


def _operations(plan: Plan) -> Iterator[str]:
    s, ms = plan.setting, 1e3
    yield "operations, ms            forward   d input  d weight  messages  what"
    for where, ops in {"begin": s.work.begin, "block": _block(plan), "end": s.work.end}.items():
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


def _messages(plan: Plan) -> Iterator[str]:
    yield "messages of rank 0 per step (bytes of the larger of input and output)"
    for (what, axis), (calls, size) in sorted(volume.counted(plan.setting).items()):
        yield f"  {what:16}{axis:10}{calls:9,} calls {size / 2**20:14,.1f} MiB"


def _step(plan: Plan) -> Iterator[str]:
    s = plan.setting
    yield f"step, s ({s.microbatches} microbatches, schedule {s.layout.schedule})"
    for name, seconds in plan.step.terms:
        yield f"  {name:38}{seconds:10.4f}"
    for name, seconds in plan.step.exposed.items():
        yield f"  {'exposed communication: ' + name:38}{seconds:10.4f}"
    yield f"  {'bubble':38}{plan.step.bubble:10.4f}"
    yield f"  {'step':38}{plan.step.seconds:10.4f}"
