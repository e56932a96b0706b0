"""A dry run beside what the formulas predict, in words and numbers."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.observe.tracking import CATEGORIES
from fivefold.plan.predict import Plan
from fivefold.train.dry_depth import DryRun

GIB = 2**30


def beside(plan: Plan, dry: DryRun) -> Iterator[str]:
    """Lines for people: memory by category, messages by axis, FLOPs."""
    yield f"dry run of rank {dry.rank}, {dry.seconds:.1f} s: {_how(dry)}"
    yield from _memory(plan, dry)
    yield from _messages(plan, dry)
    yield (
        f"  FLOPs          {dry.step.flops:.4g} in products; the model's formula, without recomputation, has "
        f"{dry.formula:.4g} a rank"
    )


def _how(dry: DryRun) -> str:
    if not dry.extrapolated:
        return "its whole step, traced as CPUs compute it"
    models = ", ".join(f"{layers} layers x {count} microbatches" for layers, count in dry.traced)
    return f"extrapolated from traces of {models}, as CPUs compute them"


def _memory(plan: Plan, dry: DryRun) -> Iterator[str]:
    position = plan.layout.coordinates(dry.rank)["pp"]
    predicted, memory = plan.memory[position], dry.step.memory
    yield "  memory, GiB    " + "".join(f"{name:>12}" for name in (*CATEGORIES, "total"))
    rows = {
        "at the peak": [*memory.at_peak.values(), memory.total],
        "predicted": [getattr(predicted, name) for name in (*CATEGORIES, "total")],
    }
    for name, values in rows.items():
        yield f"    {name:13}" + "".join(f"{value / GIB:12.4g}" for value in values)
    yield "    (fp32 masters are params here; the prediction has them under optimizer where weights are bf16)"


def _messages(plan: Plan, dry: DryRun) -> Iterator[str]:
    """Of the dry run what each collective has: the larger of input and output."""
    yield "  messages                        calls         GiB"
    for (operation, axis), (calls, size) in dry.step.sent.items():
        yield f"    {axis:10}{operation:16}{calls:9,}{size / GIB:12.4g}"
    if plan.sent:
        told = ", ".join(f"{axis} {size / GIB:.4g} GiB" for axis, size in plan.sent.items())
        yield f"    predicted, as rings send them: {told}"
