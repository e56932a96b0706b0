"""`fivefold plan RECIPE --cluster h100:64`: predicts memory, time and communication, or searches all layouts."""

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
    from fivefold.plan.clusters import Cluster
    from fivefold.plan.predict import Plan
    from fivefold.plan.questions import Questions
    from fivefold.plan.search import Found
    from fivefold.plan.software import Software
    from fivefold.recipe import Recipe
    from fivefold.train.dry_depth import DryRun

EXAMPLES = [
    "fivefold plan llama-7b --cluster h100:64 --layout dp=64,zero=1 --set train.global_batch_size=1024",
    "fivefold plan llama-7b --cluster a100:64 --search --top 5 --save best.toml",
    "fivefold plan my.toml --cluster lab.toml:16 --explain",
    "fivefold plan llama-7b --cluster h100:64 --search --pictures --html plan.html",
    "fivefold plan llama-7b --cluster h100:64 --search --tokens 1.4e12 --deadline 30d --price 2.5",
    "fivefold plan quickstart --cluster local:2 --search",
    "fivefold plan mixtral-8x7b --cluster h100:64 --search --expert-load 1.3",
    "fivefold plan --calibrate runs/a runs/b",
    "fivefold plan llama-7b --cluster h100:64 --layout dp=8,tp=8,zero=3 --dry-run",
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
            help="a100, h100, h200, b200, mi300x, local, or a .toml file; h100:64 is 64 devices, h100:8x4 8 nodes of 4",
        ),
    ] = "h100",
    search: Annotated[bool, typer.Option("--search", help="Find the fastest layouts that fit.")] = False,
    top: Annotated[int, typer.Option(min=1, max=1000, help="With --search: how many to show.")] = 10,
    explain: Annotated[bool, typer.Option("--explain", help="Print every term.")] = False,
    save: Annotated[
        Path | None, typer.Option("--save", help="Write the recipe with the (best) layout to this file.")
    ] = None,
    pictures: Annotated[
        bool, typer.Option("--pictures", help="Draw it: all pictures, in a file or pipe, too.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page with the pictures, and sliders for the sizes."),
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
            help="Fit the table of this machine to finished runs: --calibrate RUN..., or reset.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Run a training step of one rank with tensors that have no memory."),
    ] = False,
    rank: Annotated[int, typer.Option("--rank", help="With --dry-run: of which rank.")] = 0,
    expert_load: Annotated[
        float | None,
        typer.Option(
            "--expert-load",
            metavar="X",
            help="Mixture of experts over ranks: rows of the busiest rank's experts, by the even share (else 1).",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Predict memory, step time and communication of a recipe on a cluster, before anything runs.

    With --search the layout of the recipe is left out of account, and the fastest layouts that fit are listed. With one
    of --tokens, --deadline, --price and --noise-scale: days, devices, cost; tokens and batch that suit the model.
    """
    if calibrate:
        run_calibration([recipe, *(more or [])], json)
        return
    if more:
        raise UserError(f"plan: one recipe at a time, and then options: '{more[0]}' is one too many")
    _agree(search, layout, dry_run, rank)
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
        draw_plan(_predict(job, rank if dry_run else None), wanted, loaded, typed)


def _agree(search: bool, layout: str | None, dry_run: bool, rank: int) -> None:
    """Refuses options that exclude one another."""
    if search and layout is not None:
        raise UserError("--search looks for the layout itself: leave --layout out")
    if search and dry_run:
        raise UserError("--dry-run runs one layout: leave --search out, and name it with --layout")
    if rank and not dry_run:
        raise UserError("--rank says of which rank a dry run is: give --dry-run, too")


def _read(
    typed: Typed, layout: str | None, search: bool, params: float | None, expert_load: float | None
) -> tuple[Recipe, Cluster, Software]:
    """What is planned, where, and by which program."""
    from fivefold.plan.clusters import parse
    from fivefold.plan.predict import with_load
    from fivefold.plan.software import FIVEFOLD, of
    from fivefold.recipe import load

    name, sets, cluster = typed
    free = ["train.microbatch_size=none"] if search else []  # it and the layout are what is searched for
    loaded, machine = load(name, free + sets, layout), parse(cluster)
    loaded = budget.sized(loaded, params)
    own = FIVEFOLD if search else of(machine)
    return loaded, machine, with_load(own, loaded.model, expert_load)


@dataclass(frozen=True)
class Job:
    """What is asked: of which recipe where, by which program; budget questions; and what is to be shown and kept."""

    name: str
    recipe: Recipe
    machine: Cluster
    software: Software
    asked: Questions | None
    explain: bool
    save: Path | None
    json: bool


def _predict(job: Job, rank: int | None) -> Plan:
    """One layout. rank: of the dry run, if there is one."""
    from fivefold.plan.predict import predict

    result = predict(job.recipe, job.machine, job.software)
    answers = budget.answers(job.asked, result, job.recipe, job.machine)
    if job.save is not None:
        _save(job.save, job.recipe, result)
    traced = _dry_run(job.recipe, result, rank) if rank is not None else None
    if job.json:
        besides = ({"terms": dict(result.step.terms)} if job.explain else {}) | answers
        print_json(result.as_json() | besides | ({"dry_run": traced.as_json()} if traced else {}))
    else:
        print("\n".join(_text(job.name, result, job.explain, traced)))
        budget.print_answers(answers)
    return result


def _dry_run(recipe: Recipe, result: Plan, rank: int) -> DryRun:
    """In the dtype that the prediction is for."""
    from fivefold.plan.predict import resolved
    from fivefold.train.dry_depth import dry_run

    precision = recipe.precision.model_copy(update={"mode": result.setting.dtype})
    return dry_run(resolved(recipe.model_copy(update={"precision": precision})), rank)


def _search(job: Job, top: int) -> Found:
    """The fastest layouts."""
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


def _text(name: str, result: Plan, explain: bool, traced: DryRun | None = None) -> list[str]:
    from fivefold.plan.explain import explain as terms
    from fivefold.plan.explain import summary

    lines = [f"{name}: predicted", *(f"  {line}" for line in summary(result))]
    if traced:
        from fivefold.train.dry_text import beside

        lines += ["", *beside(result, traced)]
    return [*lines, "", *terms(result)] if explain else lines


def _table(name: str, found: Found) -> list[str]:
    """The plans, best first, and why the others lost."""
    from fivefold.layout import to_text

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
    lines.append(f"  the others: {reasons or 'none'}; {first.limit / 2**30:.1f} GiB a device may be used")
    if "fp8" in first.setting.cluster.device.peak:
        lines.append("  not considered: fp8, which the device has and the trainer cannot compute in yet")
    return [*lines, "  what holds the first back:", *(f"    {text}" for text in found.binding or ["nothing"])]


def _save(path: Path, recipe: Recipe, result: Plan) -> None:
    """The recipe with the planned layout, which `fivefold train` runs."""
    from fivefold.plan.search import apply
    from fivefold.recipe import to_toml

    text = to_toml(apply(recipe, result), comment=f"{result.layout.ranks} ranks, as planned by fivefold plan")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--save {path}: cannot be written: {error.strerror}") from None
