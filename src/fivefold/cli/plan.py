"""`fivefold plan RECIPE --cluster h100:64`: predicts memory, time and communication, or searches for layouts."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fivefold.cli import budget, plan_options, plan_terms
from fivefold.cli.local import ensure_measured, run_calibration
from fivefold.cli.options import (
    JsonOption,
    LayoutOption,
    RecipeArgument,
    SetOption,
    print_json,
    require_writable,
    save_as,
)
from fivefold.cli.plan_pictures import Typed, Wanted, draw_plan, draw_search
from fivefold.errors import UserError
from fivefold.precision import PRECISIONS

if TYPE_CHECKING:
    from fivefold.lessons.conventions import Conventions
    from fivefold.plan.advice.questions import Questions
    from fivefold.plan.cluster.devices import Cluster
    from fivefold.plan.predict import Plan
    from fivefold.plan.search.search import Found
    from fivefold.plan.software import Software
    from fivefold.recipe import Recipe
    from fivefold.schedules.memory_timeline import MemoryTimeline
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
    "fivefold plan llama-7b --cluster h100:8 --layout dp=8,zero=3 --memory-timeline memory.svg",
    "fivefold plan gpt2-124m --layout tp=4 --formulas",
    "fivefold plan llama2-7b --layout dp=64 --psi 7.5e9 --states paper --svg states.svg",
]
GROUPS = plan_options.GROUPS


def plan(
    context: typer.Context,
    recipe: RecipeArgument,
    more: plan_options.MoreArgument = None,
    set_: SetOption = None,
    layout: LayoutOption = None,
    cluster: plan_options.ClusterOption = "h100",
    search: plan_options.SearchOption = False,
    top: plan_options.TopOption = 10,
    precision: plan_options.PrecisionOption = None,
    explain: plan_options.ExplainOption = False,
    save: plan_options.SaveOption = None,
    pictures: plan_options.PicturesOption = False,
    html: plan_options.HtmlOption = None,
    params: plan_options.ParamsOption = None,
    tokens: plan_options.TokensOption = None,
    deadline: plan_options.DeadlineOption = None,
    price: plan_options.PriceOption = None,
    noise_scale: plan_options.NoiseOption = None,
    calibrate: plan_options.CalibrateOption = False,
    exact: plan_options.ExactOption = False,
    memory_timeline: plan_options.MemoryTimelineOption = None,
    formulas: plan_options.FormulasOption = False,
    rank: plan_options.RankOption = 0,
    expert_load: plan_options.ExpertLoadOption = None,
    document_tokens: plan_options.DocumentTokensOption = None,
    terms: plan_options.TermsOption = False,
    states: plan_options.StatesOption = None,
    activations: plan_options.ActivationsOption = None,
    bubble: plan_options.BubbleOption = None,
    flops: plan_options.FlopsOption = None,
    psi: plan_options.PsiOption = None,
    svg: plan_options.SvgOption = None,
    json: JsonOption = False,
) -> None:
    """Predict memory, step time and communication of a recipe on a cluster, before anything runs.

    --search ignores the recipe's layout and lists the fastest layouts that fit. --tokens, --deadline, --price and
    --noise-scale ask for days, devices and cost, and for the tokens and batch size that suit the model. --terms prints
    what totals are made of; --states, --activations, --bubble, --flops and --psi choose the convention of a paper or
    course for it. They change no prediction.
    """
    if calibrate:
        _alone(context, "--calibrate", {"recipe", "more", "calibrate", "json"})
        run_calibration([recipe, *(more or [])], json)
        return
    if more:
        raise UserError(f"plan takes one recipe and options; unexpected argument '{more[0]}'")
    require_writable("--svg", svg)
    if formulas:
        _alone(context, "--formulas", {"recipe", "set_", "layout", "formulas", "svg", "json"})
        plan_terms.print_formulas(recipe, set_ or [], layout, json, svg)
        return
    _agree(search, layout, exact, memory_timeline, rank)
    if precision is not None and not search:
        raise UserError("--precision lists modes for --search; of one layout, set --set precision.mode=MODE")
    assumed = expert_load, document_tokens
    wanted = Wanted(pictures, html, json, assumed)
    require_writable("--save", save)
    require_writable("--html", html)
    require_writable("--memory-timeline", memory_timeline)
    how = plan_terms.conventions(terms, states, activations, bubble, flops, psi)
    plan_terms.require_states(svg, how, search)
    ensure_measured(cluster)
    typed = (recipe, set_ or [], cluster)
    loaded, machine, software = _read(typed, "dp=1" if search else layout, search, params, *assumed)
    asked = budget.questions(loaded, tokens, deadline, price, noise_scale)
    request = Request(
        recipe, loaded, machine, software, asked, explain, save, json, memory_timeline, how, svg
    )
    if search:
        draw_search(_search(request, top, precision), wanted, loaded, typed)
    else:
        draw_plan(_predict(request, rank, exact), wanted, loaded, typed)


def _alone(context: typer.Context, option: str, beside: set[str]) -> None:
    """Refuses options that have no effect with `option`. beside: the parameters that have one."""
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name not in beside and source is not None and source.name == "COMMANDLINE":
            raise UserError(f"{parameter.opts[0]} has no effect with {option}; leave one of them out")


def _agree(search: bool, layout: str | None, exact: bool, timeline: Path | None, rank: int) -> None:
    """Refuses options that exclude each other."""
    if search and layout is not None:
        raise UserError("--search chooses the layout; leave out --layout")
    if search and exact:
        raise UserError("--exact traces one layout; leave out --search and name the layout with --layout")
    if search and timeline:
        raise UserError("--memory-timeline traces one layout; leave out --search and name it with --layout")
    if rank and not exact and not timeline:
        raise UserError("--rank chooses the rank that --exact traces; add --exact or --memory-timeline FILE")


def _read(
    typed: Typed,
    layout: str | None,
    search: bool,
    params: float | None,
    expert_load: float | None,
    document_tokens: float | None,
) -> tuple[Recipe, Cluster, Software]:
    """The recipe, the cluster and the software that the plan is for."""
    from fivefold.plan.cluster.clusters import parse
    from fivefold.plan.documents import documents_of
    from fivefold.plan.predict import with_load
    from fivefold.plan.software import of
    from fivefold.recipe import load

    name, sets, cluster = typed
    free = ["train.microbatch_size=none"] if search else []  # the search chooses it, as it does the layout
    loaded, machine = load(name, free + sets, layout), parse(cluster)
    loaded = budget.sized(loaded, params)
    software = with_load(of(machine), loaded.model, expert_load)
    return loaded, machine, replace(software, documents=documents_of(loaded, document_tokens))


@dataclass(frozen=True)
class Request:
    """One request: recipe, cluster, software, budget questions, what to show and save, conventions of terms."""

    name: str
    recipe: Recipe
    machine: Cluster
    software: Software
    asked: Questions | None
    explain: bool
    save: Path | None
    json: bool
    timeline: Path | None = None
    how: Conventions | None = None
    svg: Path | None = None


def _predict(request: Request, rank: int, traces: bool) -> Plan:
    """Predicts one layout and prints it. traces: `rank` is traced, too."""
    from fivefold.plan.predict import predict

    result = predict(request.recipe, request.machine, request.software)
    answers = budget.answers(request.asked, result, request.recipe, request.machine)
    if request.save is not None:
        _save(request.save, request.recipe, result)
    traced = _exact(request.recipe, result, rank) if traces else None
    drawn = _timelines(request.timeline, request.recipe, result, rank) if request.timeline else []
    if request.svg is not None and request.how is not None:
        states = plan_terms.drawn_states(request.how, result, request.recipe, request.asked, request.name)
        save_as("--svg", request.svg, states)
    if request.json:
        besides = ({"terms": dict(result.step.terms)} if request.explain else {}) | answers
        besides |= plan_terms.answers(request.how, result, request.recipe, request.asked)
        print_json(
            result.as_json()
            | besides
            | ({"exact": traced.as_json()} if traced else {})
            | ({"memory_timeline": [t.as_json() | {"name": name} for name, t in drawn]} if drawn else {})
            | ({"svg": request.svg} if request.svg else {})
        )
    else:
        print("\n".join(_text(request.name, result, request.explain, traced)))
        budget.print_answers(answers)
        plan_terms.print_terms(request.how, result, request.recipe, request.asked)
        if drawn:
            from fivefold.observe.memory_picture import to_text

            columns = max(40, min(160, shutil.get_terminal_size().columns) - 12)
            print(f"\nmemory over a step, as traced; {request.timeline}\n{to_text(drawn, columns)}", end="")
        if request.svg:
            print(request.svg)
    return result


def _timelines(path: Path, recipe: Recipe, result: Plan, rank: int) -> list[tuple[str, MemoryTimeline]]:
    """Memory over the first and a later step of `rank`; draws it into a file."""
    from fivefold.observe.memory_picture import to_svg
    from fivefold.trace import gpu
    from fivefold.trace.depth import timelines

    whole, on_cpu = _as_traced(recipe, result)
    drawn = timelines(whole, rank) if on_cpu else gpu.timelines_on_gpu(whole, rank)
    where = "a CPU" if on_cpu else "a GPU without torch.compile"
    title = f"{_layout_text(result)}: bytes of the tensors of rank {rank}, traced as {where} computes them"
    save_as("--memory-timeline", path, to_svg(drawn, title))
    return drawn


def _layout_text(result: Plan) -> str:
    from fivefold.spread.layout_text import to_text

    return to_text(result.layout)


def _as_traced(recipe: Recipe, result: Plan) -> tuple[Recipe, bool]:
    """(the recipe in the prediction's precision mode, True if it is traced as a CPU computes it: on CPUs, and where
    this machine cannot trace GPUs)."""
    from fivefold.plan.predict import resolved
    from fivefold.trace import gpu

    precision = recipe.precision.model_copy(update={"mode": result.setting.mode})
    whole, machine = (
        resolved(recipe.model_copy(update={"precision": precision})),
        result.setting.cluster.machine,
    )
    return whole, bool((machine is not None and machine.on_cpu) or gpu.why_not())


def _exact(recipe: Recipe, result: Plan, rank: int) -> Exact:
    """The exact figures of `rank`."""
    from fivefold.trace import gpu
    from fivefold.trace.depth import exact

    whole, on_cpu = _as_traced(recipe, result)
    return exact(whole, rank) if on_cpu else gpu.exact_on_gpu(whole, rank)


def _search(request: Request, top: int, precision: str | None) -> Found:
    """Searches for the fastest layouts and prints them."""
    from fivefold.plan.search.search import search

    modes = tuple(part.strip() for part in precision.split(",")) if precision is not None else ()
    found = search(request.recipe, request.machine, top, request.software, modes)
    if not found.plans and (request.save is not None or not request.json):
        raise UserError(
            f"{request.name} on {request.machine.name}:{request.machine.devices}: {found.nothing}"
        )
    if request.save is not None:
        _save(request.save, request.recipe, found.plans[0])
    answers = {}
    if found.plans:
        answers = budget.answers(
            request.asked, found.plans[0], request.recipe, request.machine, request.software
        )
    if request.json:
        if found.plans:
            answers |= plan_terms.answers(request.how, found.plans[0], request.recipe, request.asked)
        print_json(found.as_json() | answers)
        return found
    if found.nothing:
        print(f"without offload {found.nothing}\n")
    print("\n".join(_table(request.name, found, modes)))
    budget.print_answers(answers)
    plan_terms.print_terms(request.how, found.plans[0], request.recipe, request.asked)
    if request.explain:
        print("\n".join(["", *_text(request.name, found.plans[0], True)]))
    return found


def _text(name: str, result: Plan, explain: bool, traced: Exact | None = None) -> list[str]:
    from fivefold.plan.advice.explain import explain as terms
    from fivefold.plan.advice.explain import summary

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


def _table(name: str, found: Found, modes: tuple[str, ...]) -> list[str]:
    """The plans, best first, with the reason why each is slower. modes: those asked for, if any."""
    from fivefold.spread.layout_text import to_text

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
            f"{plan.peak_bytes / 2**30:6.3g}  {s.microbatches:4} x {s.sizes.B:<3} {s.mode}  {to_text(plan.layout)}"
            + (f"  ({why})" if why else "")
        )
    reasons = ", ".join(f"{count} {reason}" for reason, count in found.rejected.items())
    lines.append(
        f"  other layouts: {reasons or 'none'}; usable memory {first.limit / 2**30:.1f} GiB per device"
    )
    lines.append(f"  {_accuracy(first)}")
    if first.attention:
        lines.append(f"  attention of the first: {first.attention}")
    for mode in PRECISIONS.values():
        if mode.kernel and mode.rate in first.setting.cluster.device.peak and mode.name not in modes:
            names = f"{mode.working},{mode.name}"
            lines.append(f"  not considered: {mode.name}, which the device supports (--precision {names})")
    return [*lines, "  bottlenecks of the first:", *(f"    {text}" for text in found.bottlenecks or ["none"])]


def _save(path: Path, recipe: Recipe, result: Plan) -> None:
    """Writes the recipe with the planned layout, for `fivefold train`."""
    from fivefold.plan.search.search import apply
    from fivefold.recipe import to_toml

    text = to_toml(apply(recipe, result), comment=f"{result.layout.ranks} ranks, as planned by fivefold plan")
    save_as("--save", path, text)
