"""Prints the exact figures next to those of the formula."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.host.devices import GIB
from fivefold.plan.predict import Plan
from fivefold.schedules.timelines import AWAY, CATEGORIES
from fivefold.sharding.sites import in_site
from fivefold.trace.depth import Exact


def beside(plan: Plan, exact: Exact) -> Iterator[str]:
    """Lines of text: memory by category, messages by axis, FLOPs, host syncs."""
    yield f"exact figures of rank {exact.rank}, {exact.seconds:.1f} s: {_how(exact)}{_outer(plan)}"
    yield from _memory(plan, exact)
    yield from _messages(plan, exact)
    yield (
        f"  FLOPs          {exact.step.flops:.4g} in matmuls; the model's formula, without recomputation, has "
        f"{exact.formula:.4g} per rank"
    )
    yield f"  host syncs     {sum(exact.step.syncs.values()):,}"
    for (operation, place), times in exact.step.syncs.items():
        yield f"    {operation:22}{times:6,}  {place}"


def _how(exact: Exact) -> str:
    where = "a CPU" if exact.device == "cpu" else "a GPU without torch.compile"
    if not exact.extrapolated:
        return f"the trainer's own step, traced as {where} computes it"
    models = ", ".join(f"{layers} layers x {count} microbatches" for layers, count in exact.traced)
    return f"the trainer's own step as {where} computes it, extrapolated from {models}"


def _outer(plan: Plan) -> str:
    """What the traced step adds where there are several sites."""
    every = plan.setting.sites.every
    return f"; the last of {every} inner steps, with its outer step" if plan.setting.sites.count > 1 else ""


def _memory(plan: Plan, exact: Exact) -> Iterator[str]:
    site = plan.setting.layout
    position = site.coordinates(in_site(site, exact.rank)[1])["pp"]
    predicted, memory = plan.memory[position], exact.step.memory
    away = [name for name in AWAY if memory.away[name]]
    names = (*CATEGORIES, "total", *away)
    yield "  memory, GiB    " + "".join(f"{name:>12}" for name in names)
    rows = {
        "at the peak": [*memory.at_peak.values(), memory.total, *(memory.away[name] for name in away)],
        "predicted": [getattr(predicted, name) for name in names],
    }
    for name, values in rows.items():
        yield f"    {name:13}" + "".join(f"{value / GIB:12.4g}" for value in values)


def _messages(plan: Plan, exact: Exact) -> Iterator[str]:
    """Messages by operation and axis; their bytes are the larger of input and output."""
    yield "  messages                        calls         GiB"
    for (operation, axis), (calls, size) in exact.step.sent.items():
        yield f"    {axis:10}{operation:16}{calls:9,}{size / GIB:12.4g}"
    if plan.sent:
        told = ", ".join(f"{axis} {size / GIB:.4g} GiB" for axis, size in plan.sent.items())
        average = ", on average" * (plan.setting.sites.count > 1)
        yield f"    predicted{average}, as rings send them: {told}"
