"""`fivefold plan trace RECIPE --rank 3`: exact bytes, messages and FLOPs of the trainer's own step on one rank."""

from __future__ import annotations

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

if TYPE_CHECKING:
    from fivefold.plan.predict import Plan
    from fivefold.recipe import Recipe

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
        lines += ["", *depth.beside(result, traced)]
    else:
        from fivefold.observe.memory_picture import to_svg, to_text
        from fivefold.sharding.layout_text import to_text as layout_text

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
