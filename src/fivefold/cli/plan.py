"""`fivefold plan RECIPE --cluster h100:64`: predicts memory, time and communication, or searches for layouts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli import budget
from fivefold.cli.local import ensure_measured, run_calibration
from fivefold.cli.options import (
    JsonOption,
    LayoutOption,
    RecipeArgument,
    SetOption,
    print_json,
    require_writable,
)
from fivefold.cli.plan_pictures import Typed, Wanted, draw_plan, draw_search
from fivefold.errors import UserError

if TYPE_CHECKING:
    from fivefold.plan.devices import Cluster
    from fivefold.plan.predict import Plan
    from fivefold.plan.questions import Questions
    from fivefold.plan.search import Found
    from fivefold.plan.software import Software
    from fivefold.recipe import Recipe
    from fivefold.trace.depth import Exact

EXAMPLES = [
    "fivefold plan llama-7b --cluster h100:64 --layout dp=64,zero=1 --set train.global_batch_size=1024",
    "fivefold plan llama-7b --cluster a100:64 --search --top 5 --save best.toml",
    "fivefold plan my.toml --cluster lab.toml:16 --explain",
    "fivefold plan llama-7b --cluster h100:64 --search --pictures --html plan.html",
    "fivefold plan llama-7b --cluster h100:64 --search --tokens 1.4e12 --deadline 30d --price 2.5",
    "fivefold plan quickstart --cluster local:2 --search",
    "fivefold plan mixtral-8x7b --cluster h100:64 --search --expert-load 1.3",
    "fivefold plan --calibrate runs/a runs/b",
    "fivefold plan llama-7b --cluster h100:64 --layout dp=8,tp=8,zero=3 --exact",
]


def plan(
    recipe: RecipeArgument,
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    set_: SetOption = None,
    layout: LayoutOption = None,
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            metavar="NAME:DEVICES",
            help="a100, h100, h200, b200, mi300x, local or a .toml file. h100:64: 64 devices; h100:8x4: 8 nodes of 4.",
        ),
    ] = "h100",
    search: Annotated[bool, typer.Option("--search", help="Find the fastest layouts that fit.")] = False,
    top: Annotated[int, typer.Option(min=1, max=1000, help="Number of layouts that --search lists.")] = 10,
    explain: Annotated[bool, typer.Option("--explain", help="Print every term of the prediction.")] = False,
    save: Annotated[
        Path | None,
        typer.Option("--save", help="Write the recipe with the planned (best) layout to this file."),
    ] = None,
    pictures: Annotated[
        bool, typer.Option("--pictures", help="Draw all pictures, even into a file or a pipe.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page with the pictures and with sliders for the sizes."),
    ] = None,
    params: budget.ParamsOption = None,
    tokens: budget.TokensOption = None,
    deadline: budget.DeadlineOption = None,
    price: budget.PriceOption = None,
    noise_scale: budget.NoiseOption = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Fit this machine's table to finished runs: --calibrate RUN...; undo: --calibrate reset.",
        ),
    ] = False,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact", help="Trace the trainer's own step on one rank: exact bytes, messages and FLOPs."
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", hidden=True)] = False,
    rank: Annotated[int, typer.Option("--rank", help="The rank that --exact traces.")] = 0,
    expert_load: Annotated[
        float | None,
        typer.Option(
            "--expert-load",
            metavar="X",
            help="Load of the busiest expert rank relative to an even split. [default: 1]",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Predict memory, step time and communication of a recipe on a cluster, before anything runs.

    --search ignores the recipe's layout and lists the fastest layouts that fit. --tokens, --deadline, --price and
    --noise-scale ask for days, devices and cost, and for the tokens and batch size that suit the model.
    """
    if calibrate:
        run_calibration([recipe, *(more or [])], json)
        return
    if more:
        raise UserError(f"plan takes one recipe, followed by options; '{more[0]}' is one too many")
    exact = exact or dry_run  # its name in earlier versions
    _agree(search, layout, exact, rank)
    wanted = Wanted(pictures, html, json, expert_load)
    require_writable("--save", save)
    require_writable("--html", html)
    ensure_measured(cluster)
    typed = (recipe, set_ or [], cluster)
    loaded, machine, software = _read(typed, "dp=1" if search else layout, search, params, expert_load)
    asked = budget.questions(loaded, tokens, deadline, price, noise_scale)
    job = Job(recipe, loaded, machine, software, asked, explain, save, json)
    if search:
        draw_search(_search(job, top), wanted, loaded, typed)
    else:
        draw_plan(_predict(job, rank if exact else None, dry_run), wanted, loaded, typed)


def _agree(search: bool, layout: str | None, exact: bool, rank: int) -> None:
    """Refuses options that exclude each other."""
    if search and layout is not None:
        raise UserError("--search chooses the layout; leave out --layout")
    if search and exact:
        raise UserError("--exact traces one layout; leave out --search and name the layout with --layout")
    if rank and not exact:
        raise UserError("--rank chooses the rank that --exact traces; add --exact")


def _read(
    typed: Typed, layout: str | None, search: bool, params: float | None, expert_load: float | None
) -> tuple[Recipe, Cluster, Software]:
    """The recipe, the cluster and the software that the plan is for."""
    from fivefold.plan.clusters import parse
    from fivefold.plan.predict import with_load
    from fivefold.plan.software import of
    from fivefold.recipe import load

    name, sets, cluster = typed
    free = ["train.microbatch_size=none"] if search else []  # the search chooses it, as it does the layout
    loaded, machine = load(name, free + sets, layout), parse(cluster)
    loaded = budget.sized(loaded, params)
    return loaded, machine, with_load(of(machine), loaded.model, expert_load)


@dataclass(frozen=True)
class Job:
    """One request: recipe, cluster, software, budget questions, and what to show and save."""

    name: str
    recipe: Recipe
    machine: Cluster
    software: Software
    asked: Questions | None
    explain: bool
    save: Path | None
    json: bool


def _predict(job: Job, rank: int | None, dry_run: bool = False) -> Plan:
    """Predicts one layout and prints it. rank: the rank to trace, or None for the formula alone. dry_run: the trace
    was asked for by its earlier name."""
    from fivefold.plan.predict import predict

    result = predict(job.recipe, job.machine, job.software)
    answers = budget.answers(job.asked, result, job.recipe, job.machine)
    if job.save is not None:
        _save(job.save, job.recipe, result)
    traced = _exact(job.recipe, result, rank) if rank is not None else None
    if job.json:
        besides = ({"terms": dict(result.step.terms)} if job.explain else {}) | answers
        names = ("exact", "dry_run") if dry_run else ("exact",)
        print_json(
            result.as_json() | besides | ({name: traced.as_json() for name in names} if traced else {})
        )
    else:
        print("\n".join(_text(job.name, result, job.explain, traced)))
        budget.print_answers(answers)
    return result


def _exact(recipe: Recipe, result: Plan, rank: int) -> Exact:
    """Traces `rank` in the dtype that the prediction assumes."""
    from fivefold.plan.predict import resolved
    from fivefold.trace.depth import exact

    precision = recipe.precision.model_copy(update={"mode": result.setting.dtype})
    return exact(resolved(recipe.model_copy(update={"precision": precision})), rank)


def _search(job: Job, top: int) -> Found:
    """Searches for the fastest layouts and prints them."""
    from fivefold.plan.search import search

    found = search(job.recipe, job.machine, top, job.software)
    if not found.plans and (job.save is not None or not job.json):
        raise UserError(f"{job.name} on {job.machine.name}:{job.machine.devices}: {found.nothing}")
    if job.save is not None:
        _save(job.save, job.recipe, found.plans[0])
    answers = {}
    if found.plans:
        answers = budget.answers(job.asked, found.plans[0], job.recipe, job.machine, job.software)
    if job.json:
        print_json(found.as_json() | answers)
        return found
    print("\n".join(_table(job.name, found)))
    budget.print_answers(answers)
    if job.explain:
        print("\n".join(["", *_text(job.name, found.plans[0], True)]))
    return found


def _text(name: str, result: Plan, explain: bool, traced: Exact | None = None) -> list[str]:
    from fivefold.plan.explain import explain as terms
    from fivefold.plan.explain import summary

    lines = [f"{name}: predicted", *(f"  {line}" for line in summary(result))]
    if traced:
        from fivefold.trace.text import beside

        lines += ["", *beside(result, traced)]
    else:
        lines.append(f"  {_accuracy(result)}; --exact traces the real step")
    return [*lines, "", *terms(result)] if explain else lines


def _accuracy(result: Plan) -> str:
    """What was measured of the memory formula on such devices."""
    machine, error = result.setting.cluster.machine, f"{100 * result.memory_error:.2g}%"
    if machine and machine.on_cpu:
        return f"memory is from a formula, with a mean error of {error} against measured peaks"
    return f"memory is from a formula, with a mean error of {error} on published peaks of another program"


def _table(name: str, found: Found) -> list[str]:
    """The plans, best first, with the reason why each is slower."""
    from fivefold.spread.layout import to_text

    first = found.plans[0]
    where = f"{first.setting.cluster.name}:{first.layout.ranks}"
    lines = [
        f"{name} on {where}: the fastest of {found.considered} layouts, predicted",
        f"  {'step s':>9} {'MFU %':>6} {'tokens/s':>11} {'GiB':>6}  microbatches     layout",
    ]
    for plan, why in zip(found.plans, found.reasons, strict=True):
        s = plan.setting
        lines.append(
            f"  {plan.step.seconds:9.4g} {100 * plan.mfu:6.1f} {plan.tokens_per_s:11,.0f} "
            f"{plan.peak_bytes / 2**30:6.3g}  {s.microbatches:4} x {s.sizes.B:<3} {s.dtype}  {to_text(plan.layout)}"
            + (f"  ({why})" if why else "")
        )
    reasons = ", ".join(f"{count} {reason}" for reason, count in found.rejected.items())
    lines.append(
        f"  other layouts: {reasons or 'none'}; usable memory {first.limit / 2**30:.1f} GiB per device"
    )
    lines.append(f"  {_accuracy(first)}")
    if "fp8" in first.setting.cluster.device.peak:
        lines.append("  not considered: fp8, which the device supports and the trainer does not yet")
    return [*lines, "  bottlenecks of the first:", *(f"    {text}" for text in found.bottlenecks or ["none"])]


def _save(path: Path, recipe: Recipe, result: Plan) -> None:
    """Writes the recipe with the planned layout, for `fivefold train`."""
    from fivefold.plan.search import apply
    from fivefold.recipe import to_toml

    text = to_toml(apply(recipe, result), comment=f"{result.layout.ranks} ranks, as planned by fivefold plan")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--save {path}: cannot be written: {error.strerror}") from None
