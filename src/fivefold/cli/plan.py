"""`fivefold plan RECIPE --cluster h100:64`: predicts memory, time and communication of a layout. Options, pictures and
answers to budget questions are shared with `plan search`, `plan terms` and `plan trace`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fivefold.cli.bench import ensure_measured
from fivefold.cli.options import (
    JsonOption,
    LayoutOption,
    RecipeArgument,
    SetOption,
    flag,
    option,
    print_json,
    require_writable,
    save_as,
)
from fivefold.errors import UserError

if TYPE_CHECKING:
    from fivefold.plan.advice.budget import Questions
    from fivefold.plan.cluster.devices import Cluster
    from fivefold.plan.predict import Plan
    from fivefold.plan.software import Software
    from fivefold.recipe import Recipe

EXAMPLES = [
    "fivefold plan llama-7b --cluster h100:64 --layout dp=64,zero=1 --set train.global_batch_size=1024",
    "fivefold plan my.toml --cluster lab.toml:16 --explain",
    "fivefold plan gpt2-124m --cluster h100:8 --layout dp=8 --html plan.html",
    "fivefold plan llama-7b --cluster h100:64 --tokens 1.4e12 --deadline 30d --price 2.5",
]
GROUPS = {
    "Assumptions": ("params", "expert_load", "document_tokens"),
    "Budget": ("tokens", "deadline", "price", "noise_scale"),
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
ExplainOption = Annotated[bool, flag("Print every term of the prediction.", "--explain")]
SaveOption = Annotated[
    Path | None, option("FILE", "Write the recipe with the planned (best) layout to FILE.", "--save")
]
PicturesOption = Annotated[bool, flag("Draw all pictures, even into a file or a pipe.", "--pictures")]
HtmlOption = Annotated[
    Path | None, option("FILE", "Write a page with the pictures and with sliders for the sizes.")
]
ExpertLoadOption = Annotated[
    float | None, option("X", "Load of the busiest expert rank relative to an even split. [default: 1]")
]
DocumentTokensOption = Annotated[
    float | None,
    option(
        "N",
        "Average length of the documents, which attention does not cross. [default: counted in tokenized data]",
    ),
]
ParamsOption = Annotated[
    float | None, option("N", "Plan a model with about N parameters instead of the recipe's.")
]
TokensOption = Annotated[
    float | None, option("N", "Tokens to train on, such as 1.4e12. [default: the recipe's]")
]
DeadlineOption = Annotated[
    str | None, option("TIME", "Devices needed to finish within TIME, such as 30d (m, h, d, w).")
]
PriceOption = Annotated[float | None, option("X", "Price per device-hour.")]
NoiseOption = Annotated[float | None, option("N", "Gradient noise scale in tokens, as a run measured it.")]


def plan(
    recipe: RecipeArgument,
    set_: SetOption = None,
    layout: LayoutOption = None,
    cluster: ClusterOption = "h100",
    params: ParamsOption = None,
    expert_load: ExpertLoadOption = None,
    document_tokens: DocumentTokensOption = None,
    tokens: TokensOption = None,
    deadline: DeadlineOption = None,
    price: PriceOption = None,
    noise_scale: NoiseOption = None,
    explain: ExplainOption = False,
    save: SaveOption = None,
    pictures: PicturesOption = False,
    html: HtmlOption = None,
    json: JsonOption = False,
) -> None:
    """Predict memory, step time and communication of a recipe on a cluster, before anything runs.

    See also `plan search` for the fastest layouts, `plan terms` for the terms of papers and courses, `plan trace` for
    exact figures, and `plan calibrate`.
    """
    from fivefold.plan.advice.budget import answer
    from fivefold.plan.predict import predict

    for name, path in (("--save", save), ("--html", html)):
        require_writable(name, path)
    wanted = Wanted(pictures, html, json)
    typed = Typed(recipe, set_ or [], cluster, expert_load, document_tokens)
    loaded, machine, software = read(typed, layout, params)
    asked = questions(loaded, tokens, deadline, price, noise_scale)
    result = predict(loaded, machine, software)
    answers = {"budget": answer(result, asked)} if asked else {}
    save_plan(save, loaded, result)
    if json:
        terms = {"terms": dict(result.step.terms)} if explain else {}
        print_json(result.as_json() | terms | answers)
    else:
        from fivefold.plan.advice.explain import explain as every_term

        lines = [*summary(recipe, result), f"  {accuracy(result)}; `plan trace` is exact"]
        lines += ["", *every_term(result)] if explain else []
        print("\n".join([*lines, *budget_lines(answers)]))
    draw_plan(result, wanted, loaded, typed)


@dataclass(frozen=True)
class Typed:
    """What the user typed: RECIPE, --set, --cluster, --expert-load, --document-tokens."""

    name: str
    sets: list[str]
    cluster: str
    expert_load: float | None = None
    document_tokens: float | None = None


def read(
    typed: Typed, layout: str | None, params: float | None = None, search: bool = False
) -> tuple[Recipe, Cluster, Software]:
    """The recipe, the cluster and the software that a plan is for. search: of layouts and microbatches."""
    from fivefold.plan.advice.budget import shape
    from fivefold.plan.cluster.clusters import parse
    from fivefold.plan.documents import documents_of
    from fivefold.plan.predict import resolved, with_load
    from fivefold.plan.software import of
    from fivefold.recipe import load

    ensure_measured(typed.cluster)
    free = ["train.microbatch_size=none"] if search else []
    recipe, machine = load(typed.name, free + typed.sets, layout), parse(typed.cluster)
    if params is not None:
        recipe = recipe.model_copy(update={"model": shape(params, resolved(recipe).model)})
    software = with_load(of(machine), recipe.model, typed.expert_load)
    return recipe, machine, replace(software, documents=documents_of(recipe, typed.document_tokens))


def questions(
    recipe: Recipe, tokens: float | None, deadline: str | None, price: float | None, noise_scale: float | None
) -> Questions | None:
    """The budget questions asked on the command line, or None."""
    if all(value is None for value in (tokens, deadline, price, noise_scale)):
        return None
    from fivefold.plan.advice.budget import ask

    return ask(tokens, deadline, price, noise_scale, run_tokens(recipe))


def run_tokens(recipe: Recipe) -> float:
    """Tokens of the recipe's run."""
    from fivefold.recipe import tokens_before, total_steps

    return float(tokens_before(recipe, total_steps(recipe)))


def budget_lines(answers: dict[str, Any]) -> list[str]:
    """The answers to budget questions as lines of text. answers: {"budget": ...}, or {} without questions."""
    from fivefold.plan.advice.budget import lines

    return [f"  {line}" for line in lines(answers["budget"])] if answers else []


def summary(name: str, plan: Plan) -> list[str]:
    from fivefold.plan.advice.explain import summary as lines

    return [f"{name}: predicted", *(f"  {line}" for line in lines(plan))]


def accuracy(plan: Plan) -> str:
    """What was measured of the memory formula on such devices."""
    machine, error = plan.setting.cluster.machine, f"{100 * plan.memory_error:.2g}%"
    if machine and machine.on_cpu:
        return f"memory is from a formula, with a mean error of {error} against measured peaks"
    return f"memory is from a formula, with a mean error of {error} on published peaks of another program"


def save_plan(path: Path | None, recipe: Recipe, plan: Plan) -> None:
    """Writes the recipe with the planned layout, for `fivefold train`."""
    if path is None:
        return
    from fivefold.plan.search.search import apply
    from fivefold.recipe import to_toml

    text = to_toml(apply(recipe, plan), comment=f"{plan.layout.ranks} ranks, as planned by fivefold plan")
    save_as("--save", path, text)


@dataclass(frozen=True)
class Wanted:
    """Drawing options. A terminal shows a short form of the pictures even without --pictures."""

    pictures: bool
    html: Path | None
    json: bool

    def __post_init__(self) -> None:
        if self.json and self.pictures:
            raise UserError("--pictures and --json exclude each other; leave one out")

    @property
    def printed(self) -> bool:
        return not self.json and (self.pictures or sys.stdout.isatty())


def draw_plan(
    plan: Plan, wanted: Wanted, recipe: Recipe, typed: Typed, frontier: Sequence[Plan] = ()
) -> None:
    """Prints and writes the pictures of a plan. frontier: of a search, whose best plan it is."""
    if plan.service is not None:
        if wanted.pictures or wanted.html is not None:
            raise UserError('no pictures are drawn of a plan with sync.method = "server"')
        return
    if wanted.printed:
        print_pictures(plan if wanted.pictures or not frontier else None, wanted.pictures, frontier)
    if wanted.html is not None:
        write_page(wanted.html, recipe, _told(recipe, typed), frontier)


def _told(recipe: Recipe, typed: Typed) -> Typed:
    """`typed` with `--set` values added for the model and precision fields that other options changed."""
    from fivefold.recipe import load

    kept = [text for text in typed.sets if not text.strip().startswith("layout.")]
    before = load(typed.name, kept, "dp=1")
    for section in ("model", "precision"):
        old, new = getattr(before, section), getattr(recipe, section)
        for key in type(new).model_fields:
            if (value := getattr(new, key)) != getattr(old, key):
                kept.append(f"{section}.{key}={str(value).lower()}")
    return replace(typed, sets=kept)


def print_pictures(plan: Plan | None, full: bool, frontier: Sequence[Plan] = ()) -> None:
    """Prints in the terminal's width, with colours only on a terminal. `plan` is None to draw the frontier alone."""
    from rich.console import Console

    from fivefold.plan.pages import pictures as drawn

    width = max(drawn.NARROWEST, shutil.get_terminal_size().columns)
    console = Console(file=sys.stdout, width=width, highlight=False)
    lines = []
    if frontier:
        lines += ["", *drawn.frontier(frontier, width)]
    if plan is not None:
        lines += ["", *drawn.draw(drawn.pictures(plan), width, console.color_system is not None, full)]
    for line in lines:
        console.print(line, soft_wrap=True)


def write_page(
    path: Path,
    recipe: Recipe,
    typed: Typed,
    frontier: Sequence[Plan] = (),
    budget: float | None = None,
) -> None:
    """Writes the page of this recipe, with sliders over a grid around it.

    Args:
        budget: limit on the work of predicting the grid [default: `grid.BUDGET`].

    Raises:
        UserError: as `predict`, or the file cannot be written.
    """
    from fivefold.observe.format import short_number
    from fivefold.plan.pages import grid
    from fivefold.plan.pages import page as plan_page
    from fivefold.plan.pages.pictures import frontier_svg, memory_svg, pictures, roofline_svg
    from fivefold.plan.search.search import as_rows
    from fivefold.recipe import count_parameters
    from fivefold.schedules.pipeline import to_svg

    center = grid.base(recipe, typed.cluster, typed.expert_load, typed.document_tokens)
    sliders = grid.axes(center, budget or grid.BUDGET)
    data = grid.as_data(
        center, grid.command(typed.name, typed.sets, typed.expert_load, typed.document_tokens), sliders
    )
    drawn = pictures(grid.plan_at(center, center.values))
    rows = as_rows(frontier)
    shown = [
        memory_svg(drawn.plan, "Memory of a device"),
        roofline_svg(drawn.roofline, drawn.plan.step.seconds, "Roofline of the step"),
        *([to_svg(drawn.timeline, "Timeline of the pipeline")] if drawn.timeline else []),
        *([frontier_svg(rows, drawn.plan.limit, "Fastest layout for each memory")] if rows else []),
    ]
    model = center.full.model
    words = (
        f"A {model.arch} model of {short_number(count_parameters(model))} parameters on {typed.cluster}, in "
        f"{drawn.plan.setting.mode}: predicted memory, step time and throughput."
    )
    if drawn.plan.attention:
        words += f" Attention: {drawn.plan.attention}."
    data["search"] = {"limit": drawn.plan.limit, "rows": rows} if rows else None
    text = plan_page.page(Path(typed.name).stem, words, data, shown)
    save_as("--html", path, text)
    print(f"wrote {path}: {len(data['index']):,} predictions, {len(text) / 1e6:.1f} MB", file=sys.stderr)
