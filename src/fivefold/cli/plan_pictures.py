"""`fivefold plan --pictures` and `--html FILE`: draws a plan in the terminal or as a page."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.cli.options import save_as
from fivefold.errors import UserError

if TYPE_CHECKING:
    from fivefold.cli.plan_shared import Typed
    from fivefold.plan.predict import Plan
    from fivefold.plan.search.search import Found
    from fivefold.recipe import Recipe


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


def draw_plan(plan: Plan, wanted: Wanted, recipe: Recipe, typed: Typed) -> None:
    """Prints and writes the pictures of a plan."""
    if plan.service is not None:
        if wanted.pictures or wanted.html is not None:
            raise UserError('no pictures are drawn of a plan with sync.method = "server"')
        return
    if wanted.printed:
        print_pictures(plan, wanted.pictures)
    if wanted.html is not None:
        write_page(wanted.html, recipe, _told(recipe, typed))


def draw_search(found: Found, wanted: Wanted, recipe: Recipe, typed: Typed) -> None:
    """Prints and writes the pictures of a search: its frontier and the best plan."""
    if not found.plans or not (wanted.printed or wanted.html):
        return
    from fivefold.plan.search.search import apply, frontier

    best, plans = found.plans[0], frontier(found)
    if wanted.printed:
        print_pictures(best if wanted.pictures else None, wanted.pictures, plans)
    if wanted.html is not None:
        chosen = apply(recipe, best)
        write_page(wanted.html, chosen, _told(chosen, typed), plans)


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

    from fivefold.plan.pages import text as plan_text
    from fivefold.plan.pages.pictures import pictures

    width = max(plan_text.NARROWEST, shutil.get_terminal_size().columns)
    console = Console(file=sys.stdout, width=width, highlight=False)
    lines = []
    if frontier:
        lines += ["", *plan_text.frontier(frontier, width)]
    if plan is not None:
        lines += ["", *plan_text.draw(pictures(plan), width, console.color_system is not None, full)]
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
