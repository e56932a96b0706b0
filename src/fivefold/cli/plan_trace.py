"""`fivefold plan trace RECIPE --rank 3`: exact bytes, messages and FLOPs of the trainer's own step on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fivefold.cli import plan as shared
from fivefold.cli.options import (
    JsonOption,
    LayoutOption,
    RecipeArgument,
    SetOption,
    columns,
    option,
    print_json,
    require_writable,
    save_as,
)
from fivefold.host.devices import GIB
from fivefold.schedules.memory_timeline import AWAY, CATEGORIES
from fivefold.sharding.sync import in_site

if TYPE_CHECKING:
    from fivefold.plan.predict import Plan
    from fivefold.recipe import Recipe
    from fivefold.trace.depth import Exact

EXAMPLES = [
    "fivefold plan trace llama-7b --cluster h100:64 --layout dp=8,tp=8,zero=3",
    "fivefold plan trace llama-7b --cluster h100:8 --layout dp=8,zero=3 --memory-timeline memory.svg",
]


def trace(
    recipe: RecipeArgument,
    set_: SetOption = None,
    layout: LayoutOption = None,
    cluster: shared.ClusterOption = "h100",
    rank: Annotated[int, option("N", "The rank to trace.")] = 0,
    memory_timeline: Annotated[
        Path | None,
        option("FILE.svg", "Draw its memory over the step instead, by category, here and in FILE."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Trace the trainer's own step on one rank, on tensors without memory, beside the prediction. Needs torch."""
    from fivefold.plan.predict import predict
    from fivefold.trace import depth, gpu

    require_writable("--memory-timeline", memory_timeline)
    loaded, machine, software = shared.read(shared.Typed(recipe, set_ or [], cluster), layout)
    result = predict(loaded, machine, software)
    whole, on_cpu = _as_traced(loaded, result)
    found: dict[str, Any] = result.as_json()
    lines = shared.summary(recipe, result)
    if memory_timeline is None:
        traced = depth.exact(whole, rank) if on_cpu else gpu.exact_on_gpu(whole, rank)
        found["exact"] = traced.as_json()
        lines += ["", *_beside(result, traced)]
    else:
        from fivefold.observe.memory_picture import to_svg, to_text
        from fivefold.sharding.layout import to_text as layout_text

        drawn = depth.timelines(whole, rank) if on_cpu else gpu.timelines_on_gpu(whole, rank)
        where = "a CPU" if on_cpu else "a GPU without torch.compile"
        of = f"bytes of the tensors of rank {rank}, traced as {where} computes them"
        save_as("--memory-timeline", memory_timeline, to_svg(drawn, f"{layout_text(result.layout)}: {of}"))
        found["memory_timeline"] = [timeline.as_json() | {"name": name} for name, timeline in drawn]
        text = to_text(drawn, columns(40, 160, words=12)).rstrip()
        lines += ["", f"memory over a step, as traced; {memory_timeline}", text]
    print_json(found) if json else print("\n".join(lines))


def _as_traced(recipe: Recipe, result: Plan) -> tuple[Recipe, bool]:
    """(the recipe in the prediction's precision mode, True if it is traced as a CPU computes it: on CPUs, and where
    this machine cannot trace GPUs)."""
    from fivefold.plan.predict import resolved
    from fivefold.trace import gpu

    precision = recipe.precision.model_copy(update={"mode": result.setting.mode})
    machine = result.setting.cluster.machine
    on_cpu = bool((machine is not None and machine.on_cpu) or gpu.why_not())
    return resolved(recipe.model_copy(update={"precision": precision})), on_cpu


def _beside(plan: Plan, exact: Exact) -> Iterator[str]:
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
