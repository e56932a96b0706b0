"""`fivefold plan RECIPE --cluster h100:64` predicts memory, time and communication of a layout, `plan search` lists the
fastest layouts that fit, `plan trace` has exact bytes, messages and FLOPs of the trainer's own step on one rank."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fivefold import wings
from fivefold.cli import options
from fivefold.cli.options import flag, option, print_json
from fivefold.errors import UserError, printable, several
from fivefold.precision import PRECISIONS
from fivefold_plan.commands import budgets
from fivefold_plan.commands.bench import ensure_measured

if TYPE_CHECKING:
    from fivefold.recipe import Recipe
    from fivefold_plan.asked import Typed
    from fivefold_plan.cluster.devices import Cluster
    from fivefold_plan.predict import Plan
    from fivefold_plan.search.search import Found
    from fivefold_plan.setting import Software


CLUSTER = "h100"
GROUPS = {
    "Assumptions": ("params", "software", "margin", "expert_load", "document_tokens"),
    "Budget": ("tokens", "deadline", "price", "mtbf", "restart", "noise_scale"),
}
"""Headings of the help, and the options below each."""

ClusterOption = Annotated[
    str,
    option(
        "NAME:DEVICES",
        "A name of `fivefold clusters`, local, or a .toml file. h100:64: 64 devices; h100:8x4: 8 nodes of 4.",
        "--cluster",
    ),
]
ClustersOption = Annotated[
    list[str] | None,
    option(
        "NAME:DEVICES",
        "A name of `fivefold clusters`, local, or a .toml file. h100:8x4: 8 nodes of 4. Repeatable: side by side. "
        "[default: h100]",
        "--cluster",
    ),
]
ExplainOption = Annotated[bool, flag("Print every term of the prediction.", "--explain")]
SaveOption = Annotated[
    Path | None, option("FILE", "Write the recipe with the planned (best) layout to FILE.", "--save")
]
PicturesOption = Annotated[bool, flag("Draw all pictures, even into a file or a pipe.", "--pictures")]
HtmlOption = Annotated[
    Path | None, option("FILE", "Write a page with the pictures and with sliders for the sizes.")
]
ExpertLoadOption = Annotated[
    float | None, option("X", "Load of the busiest expert rank (1: even). [default: 1]")
]
DocumentTokensOption = Annotated[
    float | None, option("N", "Average tokens of a document. [default: from the data]")
]
MarginOption = Annotated[
    float | None, option("PERCENT", "Memory to leave free. [default: the cluster's]", min=0, max=99)
]
ParamsOption = Annotated[
    float | None, option("N", "Plan a model of about N parameters, such as 13B.", parser=options.number)
]
SoftwareOption = Annotated[
    str | None,
    option(
        "NAME", "Who trains: nemo, torchtitan, nanotron, deepspeed, megatron-core, megatron-2021, a .toml."
    ),
]


def plan(
    recipe: options.RecipeArgument,
    set_: options.SetOption = None,
    layout: options.LayoutOption = None,
    cluster: ClustersOption = None,
    params: ParamsOption = None,
    software: SoftwareOption = None,
    margin: MarginOption = None,
    expert_load: ExpertLoadOption = None,
    document_tokens: DocumentTokensOption = None,
    tokens: budgets.TokensOption = None,
    deadline: budgets.DeadlineOption = None,
    price: budgets.PriceOption = None,
    mtbf: budgets.MtbfOption = None,
    restart: budgets.RestartOption = None,
    noise_scale: budgets.NoiseOption = None,
    explain: ExplainOption = False,
    save: SaveOption = None,
    pictures: PicturesOption = False,
    html: HtmlOption = None,
    json: options.JsonOption = False,
) -> None:
    """Predict memory, step time and communication of a recipe on a cluster.

    A layout for another number of devices is replaced by the fastest that fits. See also `plan search`, `plan terms`
    (of courses), `plan trace` (exact), `plan calibrate`. RECIPE: or a file of torchtitan, Megatron, Hugging Face.
    """
    from fivefold_plan.advice.budget import answer
    from fivefold_plan.asked import Typed

    require_pictures(pictures, save, html, json)
    assumed = given(margin, expert_load, document_tokens)
    every = [Typed(recipe, set_ or [], name, assumed, software or "") for name in cluster or [CLUSTER]]
    typed, ask = every[0], budgets.Asked(tokens, deadline, price, noise_scale, mtbf, restart)
    source = told(recipe, typed.cluster, json)
    plans = [(one.cluster, partial(planned, one, layout, params, ask)) for one in every]
    alone = {"explain": explain, "save": save, "html": html, "pictures": pictures}
    if budgets.side_by_side(recipe, plans, ask, json, **alone):
        return
    loaded, result, searched = planned(typed, layout, params, ask)
    asked = ask.of(loaded)
    answers = {"budget": answer(result, asked)} if asked and result.fits else {}
    save_plan(save, loaded, result)
    if json:
        terms = {"terms": dict(result.step.terms)} if explain else {}
        print_json(result.as_json() | ({"searched": searched} if searched else {}) | terms | answers | source)
    else:
        from fivefold_plan.advice.explain import explain as every_term

        lines = [searched] * bool(searched)
        lines += summary(recipe, result)
        lines += ["", *every_term(result)] if explain else []
        lines += [f"  {budgets.NO_BUDGET}"] if asked and not result.fits else budgets.budget_lines(answers)
        print("\n".join([*lines, *accuracy(result)]))
    draw_plan(result, loaded, typed, pictures, html, json)


def told(name: str, cluster: str, json: bool) -> dict[str, Any]:
    """Prints what was understood of another program's configuration and what was not, unless `json`. Returns {"read":
    the same}; {} for a recipe. Raises UserError: as `fivefold_plan.foreign.read`."""
    from fivefold.recipe.load import is_foreign, read_foreign
    from fivefold_plan.cluster.clusters import parse

    if not is_foreign(name):
        return {}
    ensure_measured(cluster)
    reading = read_foreign(name, parse(cluster).devices)
    assert reading is not None
    if not json:
        software = reading.tables.get("software")
        priced = f" (--software {software} prices that program, and not this one)" if software else ""
        print(f"{name}: a configuration of {reading.kind}, {len(reading.understood)} keys understood{priced}")
        lines = [f"no effect on a plan ({why}): {', '.join(keys)}" for why, keys in reading.unused.items()]
        lines += [f"not understood: {key}: {why}" for key, why in reading.missing.items()]
        print(printable("".join(f"  {line}\n" for line in [*reading.notes, *lines])))
    parts = ("understood", "unused", "missing", "notes")
    return {"read": {"kind": reading.kind} | {part: getattr(reading, part) for part in parts}}


def given(margin: float | None, load: float | None, tokens: float | None) -> dict[str, float]:
    given = {"--margin": margin, "--expert-load": load, "--document-tokens": tokens}
    return {name: value for name, value in given.items() if value is not None}


def read(
    typed: Typed, layout: str | None, params: float | None = None, search: bool = False
) -> tuple[Recipe, Cluster, Software]:
    """As `plan.asked.read`; a machine that was not measured may be, if there is somebody to ask."""
    from fivefold_plan.asked import read

    ensure_measured(typed.cluster)
    return read(typed, layout, params, search)


def planned(
    typed: Typed, layout: str | None, params: float | None, ask: budgets.Asked
) -> tuple[Recipe, Plan, str]:
    """(recipe, its plan, "" or what was searched). The fastest layout that fits takes the place of the recipe's own,
    if that does not have the cluster's number of ranks, and so does the one on the fewest devices that meet a deadline,
    if the cluster has no number. One that was typed stays: it is refused. Raises UserError: the plan cannot be made, no
    layout fits, or none meets the deadline."""
    from fivefold.sharding.layout import Layout, to_text
    from fivefold_plan.predict import predict
    from fivefold_plan.software import OWN

    recipe, machine, software = read(typed, layout, params)
    own = Layout.from_recipe(recipe.layout)
    typed_layout = layout is not None or any(text.strip().startswith("layout.") for text in typed.sets)
    alone = recipe.replica_groups.count > 1 or recipe.servers.count > 0  # not searched
    foreign_software = typed.software not in ("", OWN)
    if (
        ask.deadline
        and machine.connected
        and not (machine.devices or typed_layout or alone or foreign_software)
    ):
        return in_time(typed, params, ask)
    if typed_layout or alone or machine.devices in (0, own.ranks):
        return recipe, predict(recipe, machine, software), ""
    if foreign_software:
        raise UserError(
            f"--software {typed.software}: the layout of {typed.name} is for {several(own.ranks, 'rank')} and not for "
            f"{machine.devices}, and layouts are searched for this program only; give --layout"
        )
    best, result, considered = fastest(typed, params)
    why = (
        f"searched: the layout of {typed.name}, {to_text(own)}, is for {several(own.ranks, 'rank')} and not for "
        f"{machine.devices}; this is the fastest of {considered:,} that are (`plan search` lists more)"
    )
    return best, result, why


def fastest(typed: Typed, params: float | None) -> tuple[Recipe, Plan, int]:
    """(the recipe with the fastest layout that fits, its plan, the number of layouts). Raises UserError: none fits."""
    from fivefold_plan.predict import predict
    from fivefold_plan.search.search import apply
    from fivefold_plan.search.search import search as found_by

    recipe, machine, software = read(typed, "dp=1", params, search=True)
    found = found_by(recipe, machine, 1, software)
    if not found.plans:
        raise UserError(f"{typed.name} on {machine.name}:{machine.devices}: {found.nothing}")
    best = apply(recipe, found.plans[0])
    return best, predict(best, machine, software), found.considered


def in_time(typed: Typed, params: float | None, ask: budgets.Asked) -> tuple[Recipe, Plan, str]:
    """As `planned`, on the fewest nodes that fit and meet the deadline. Raises UserError: none does."""
    from fivefold_plan.advice.budget import answer
    from fivefold_plan.predict import predict
    from fivefold_plan.search.search import apply, fewest_devices

    recipe, machine, software = read(typed, "dp=1", params, search=True)
    asked = ask.of(recipe, always=True)
    plan, stride = fewest_devices(recipe, machine, asked, software) if asked else (None, 1)
    if asked is None or plan is None:
        batch = f"{several(recipe.train.global_batch_size, 'sequence')} of {recipe.model.seq_len:,} tokens"
        raise UserError(
            f"--deadline {ask.deadline}: no tried number of whole nodes of {machine.name} fits and meets it with a "
            f"batch of {batch}. A larger train.global_batch_size keeps more devices busy"
        )
    tried = f" (one in {stride} numbers of nodes was tried)" if stride > 1 else ""
    why = f"searched: {plan.ranks} devices are the fewest, in whole nodes, that fit and meet the deadline{tried}"
    best = apply(recipe, plan)
    why += budgets.uneven(recipe, plan.ranks, answer(plan, asked)["devices_for_deadline"])
    return best, predict(best, machine, software), why


def _fastest(typed: Typed, params: float | None) -> tuple[Recipe, Plan, str]:
    return (*fastest(typed, params)[:2], "")


def summary(name: str, plan: Plan) -> list[str]:
    from fivefold_plan.advice.explain import summary as lines

    return [f"{name}: predicted", *(f"  {line}" for line in lines(plan))]


def accuracy(plan: Plan) -> list[str]:
    """What was measured of the memory formula on such devices, and of the time of such runs."""
    from fivefold_plan.memory import memory
    from fivefold_plan.software import said

    measured = f"memory {100 * memory.ERROR:.2g}% off measured peaks on average"
    size, *time = [measured] if plan.setting.cluster.on_cpu else said(plan.setting)
    return [f"  accuracy      {size}; `plan trace` is exact", *(f"                {line}" for line in time)]


def save_plan(path: Path | None, recipe: Recipe, plan: Plan) -> None:
    """Writes the recipe with the planned layout, for `fivefold train`."""
    if path is None:
        return
    from fivefold.recipe import to_toml
    from fivefold_plan.search.search import apply

    text = to_toml(apply(recipe, plan), comment=f"{plan.layout.ranks} ranks, as planned by fivefold plan")
    options.save_as("--save", path, text)


def require_pictures(pictures: bool, save: Path | None, html: Path | None, json: bool) -> None:
    """Raises UserError, before long work, for options of files and pictures that cannot be followed."""
    options.require_writable(save=save, html=html)
    if json and pictures:
        raise UserError("--pictures and --json exclude each other; leave one out")


def draw_plan(
    plan: Plan,
    recipe: Recipe,
    typed: Typed,
    wanted: bool,
    html: Path | None,
    json: bool,
    frontier: Sequence[Plan] = (),
) -> None:
    """Prints and writes the pictures of a plan. wanted: all of them; a terminal shows a short form without, too.
    frontier: of a search, whose best plan it is."""
    from fivefold.recipe import load

    if plan.service is not None:
        if wanted or html is not None:
            raise UserError('no pictures are drawn of a plan with sync.method = "server"')
        return
    if wanted or (sys.stdout.isatty() and not json):
        from rich.console import Console

        from fivefold_plan.pages import pictures as drawn

        width = max(drawn.NARROWEST, shutil.get_terminal_size().columns)
        console = Console(file=sys.stdout, width=width, highlight=False)  # colours only on a terminal
        lines = ["", *drawn.frontier(frontier, width)] if frontier else []
        if wanted or not frontier:
            lines += ["", *drawn.draw(drawn.pictures(plan), width, console.color_system is not None, wanted)]
        for line in lines:
            console.print(line, soft_wrap=True)
    if html is not None:
        # What other options changed of the model and the precision, as values of --set
        sets = [text for text in typed.sets if not text.strip().startswith("layout.")]
        before = load(typed.name, sets, "dp=1", devices=0)
        for section in ("model", "precision"):
            old, new = getattr(before, section), getattr(recipe, section)
            for key in type(new).model_fields:
                if (value := getattr(new, key)) != getattr(old, key):
                    sets.append(f"{section}.{key}={str(value).lower()}")
        if recipe.train.microbatch_size != before.train.microbatch_size:  # as a search has found it
            sets.append(f"train.microbatch_size={recipe.train.microbatch_size}")
        write_page(html, recipe, replace(typed, sets=sets), frontier)


def write_page(path: Path, recipe: Recipe, typed: Typed, frontier: Sequence[Plan] = ()) -> None:
    """Writes the page of this recipe, with sliders over a grid around it. Raises UserError: as `predict`, or the file
    cannot be written."""
    from fivefold.observe.format import short_number
    from fivefold.recipe import count_parameters
    from fivefold.sharding.layout import Layout, to_text
    from fivefold_plan.cluster.clusters import canonical
    from fivefold_plan.predict import resolved

    pages = wings.part("pages")
    layout = to_text(Layout.from_recipe(recipe.layout))
    cluster = canonical(typed.cluster)
    at = pages.Position(
        typed.name, (*typed.sets,), layout, cluster, given=typed.given, software=typed.software
    )
    model = resolved(recipe).model
    size = short_number(count_parameters(model))
    lead = f"A {model.arch} model of {size} parameters on {typed.cluster}: predicted memory, step time, throughput."
    text, count = pages.page(at, Path(typed.name).stem, lead, frontier)
    options.save_as("--html", path, text)
    print(f"wrote {path}: {count:,} predictions, {len(text) / 1e6:.1f} MB", file=sys.stderr)


def search(
    recipe: options.RecipeArgument,
    set_: options.SetOption = None,
    cluster: ClustersOption = None,
    top: Annotated[
        int | None, option("N", "Number of layouts to list. [default: 10]", min=1, max=1000)
    ] = None,
    precision: Annotated[
        str | None, option("MODES", "Precision modes to consider, such as bf16,fp8. [default: the recipe's]")
    ] = None,
    params: ParamsOption = None,
    margin: MarginOption = None,
    expert_load: ExpertLoadOption = None,
    document_tokens: DocumentTokensOption = None,
    tokens: budgets.TokensOption = None,
    deadline: budgets.DeadlineOption = None,
    price: budgets.PriceOption = None,
    mtbf: budgets.MtbfOption = None,
    restart: budgets.RestartOption = None,
    noise_scale: budgets.NoiseOption = None,
    explain: ExplainOption = False,
    save: SaveOption = None,
    pictures: PicturesOption = False,
    html: HtmlOption = None,
    json: options.JsonOption = False,
) -> None:
    """List the fastest layouts of a recipe that fit on a cluster.

    The recipe's own layout and microbatch size are ignored.
    """
    from fivefold_plan.advice.explain import explain as every_term
    from fivefold_plan.asked import Typed
    from fivefold_plan.search import search as searching

    require_pictures(pictures, save, html, json)
    assumed = given(margin, expert_load, document_tokens)
    every = [Typed(recipe, set_ or [], name, assumed) for name in cluster or [CLUSTER]]
    typed, ask = every[0], budgets.Asked(tokens, deadline, price, noise_scale, mtbf, restart)
    source = told(recipe, typed.cluster, json)
    plans = [(one.cluster, partial(_fastest, one, params)) for one in every]
    alone = {"explain": explain, "save": save, "html": html, "pictures": pictures, "precision": precision}
    if budgets.side_by_side(recipe, plans, ask, json, top=top, **alone):
        return
    loaded, machine, software = read(typed, "dp=1", params, search=True)
    asked, modes = ask.of(loaded), tuple(part.strip() for part in precision.split(",")) if precision else ()
    found = searching.search(loaded, machine, top or 10, software, modes)
    if not found.plans and (save is not None or not json):
        raise UserError(f"{recipe} on {machine.name}:{machine.devices}: {found.nothing}")
    best = found.plans[0] if found.plans else None
    answers = budgets.answers(asked, best, loaded, machine, software) if asked and best else {}
    if json:
        print_json(found.as_json() | answers | source)
    elif best:
        lines = [*_table(recipe, found, modes), *budgets.budget_lines(answers)]
        lines += ["", *summary(recipe, best), "", *every_term(best)] if explain else []
        print("\n".join(lines))
    if best:
        save_plan(save, loaded, best)
        frontier = searching.frontier(found) if pictures or html else ()  # a search for each of its plans
        draw_plan(best, searching.apply(loaded, best), typed, pictures, html, json, frontier)


def _table(name: str, found: Found, modes: tuple[str, ...]) -> list[str]:
    """The plans, best first, with the reason why each is slower. modes: those asked for, if any."""
    from fivefold.sharding.layout import to_text
    from fivefold_plan.advice.explain import margin

    first = found.plans[0]
    where = f"{first.setting.cluster.name}:{first.layout.ranks}"
    lines = [f"without offload {found.nothing}", ""] if found.nothing else []
    lines += [
        f"{name} on {where}: the fastest of {found.considered} layouts, predicted",
        f"  {'step s':>9} {'MFU %':>6} {'tokens/s':>11} {'GiB':>6}  microbatches     layout",
    ]
    for plan, why, same in zip(found.plans, found.reasons, found.same, strict=True):
        s = plan.setting
        notes = [why] * bool(why) + [f"{len(same)} more as fast"] * bool(same)
        lines.append(
            f"  {plan.step.seconds:9.4g} {100 * plan.mfu:6.1f} {plan.tokens_per_s:11,.0f} "
            f"{plan.peak_bytes / 2**30:6.3g}  {s.microbatches:4} x {s.sizes.B:<3} {s.mode}  {to_text(plan.layout)}"
            + (f"  ({'; '.join(notes)})" if notes else "")
        )
    reasons = ", ".join(f"{count} {reason}" for reason, count in found.rejected.items())
    room = f"usable memory {first.limit / 2**30:.1f} GiB per device"
    if first.setting.cluster.device.margin:
        room += f", after {margin(first.setting.cluster)}"
    lines += [f"  other layouts: {reasons or 'none'}; {room}", *accuracy(first)]
    if first.attention:
        lines.append(f"  attention of the first: {first.attention}")
    for mode in PRECISIONS.values():
        if mode.kernel and mode.products in first.setting.cluster.device.peak and mode.name not in modes:
            names = f"{mode.working},{mode.name}"
            lines.append(f"  not considered: {mode.name}, which the device supports (--precision {names})")
    return [*lines, "  bottlenecks of the first:", *(f"    {text}" for text in found.bottlenecks or ["none"])]


def trace(
    recipe: options.RecipeArgument,
    set_: options.SetOption = None,
    layout: options.LayoutOption = None,
    cluster: ClusterOption = CLUSTER,
    rank: Annotated[int, option("N", "The rank to trace.")] = 0,
    memory_timeline: Annotated[
        Path | None,
        option("FILE.svg", "Draw its memory over the step instead, by category, here and in FILE."),
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Trace the trainer's own step on one rank, on tensors without memory, beside the prediction. Needs torch."""
    from fivefold_plan.asked import Typed
    from fivefold_plan.predict import predict, resolved
    from fivefold_plan.trace import depth, gpu

    options.require_writable(memory_timeline=memory_timeline)
    loaded, machine, software = read(Typed(recipe, set_ or [], cluster), layout)
    result = predict(loaded, machine, software)
    # In the prediction's precision mode; as a CPU computes it also where this machine cannot trace GPUs
    precision = loaded.precision.model_copy(update={"mode": result.setting.mode})
    whole = resolved(loaded.model_copy(update={"precision": precision}))
    here = result.setting.cluster.machine
    on_cpu = bool((here is not None and here.on_cpu) or gpu.why_not())
    found: dict[str, Any] = result.as_json()
    lines = summary(recipe, result)
    if memory_timeline is None:
        traced = depth.exact(whole, rank) if on_cpu else gpu.exact_on_gpu(whole, rank)
        found["exact"] = traced.as_json()
        lines += ["", *depth.beside(result, traced)]
    else:
        from fivefold.observe.memory_picture import to_svg, to_text
        from fivefold.sharding.layout import to_text as layout_text

        drawn = depth.timelines(whole, rank) if on_cpu else gpu.timelines_on_gpu(whole, rank)
        where = "a CPU" if on_cpu else "a GPU"
        of = f"bytes of the tensors of rank {rank}, traced as {where} computes them"
        options.save_as(
            "--memory-timeline", memory_timeline, to_svg(drawn, f"{layout_text(result.layout)}: {of}")
        )
        found["memory_timeline"] = [timeline.as_json() | {"name": name} for name, timeline in drawn]
        text = to_text(drawn, options.columns(40, 160, words=12)).rstrip()
        lines += ["", f"memory over a step, as traced; {memory_timeline}", text]
    print_json(found) if json else print("\n".join(lines))
