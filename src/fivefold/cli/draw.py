"""`fivefold draw RECIPE --layout L`: draws which rank holds what, and the pipeline's timeline."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.options import JsonOption, LayoutOption, RecipeArgument, SetOption, print_json

if TYPE_CHECKING:
    from fivefold.recipe import Recipe
    from fivefold.schedules.pipeline import Timeline
    from fivefold.spread.layout import Layout

EXAMPLES = [
    "fivefold draw quickstart --layout dp=2,tp=2,zero=3",
    "fivefold draw llama-7b --layout pp=4,schedule=zbv,virtual_stages=2,tp=2 --out pictures",
]
VOCABULARY = 32000  # used for the picture when only the tokenizer's file knows the real size


def draw(
    recipe: RecipeArgument,
    set_: SetOption = None,
    layout: LayoutOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", show_default=False, help="Also write layout.svg and schedule.svg to DIR."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Draw a layout: what each rank computes and stores, and the timeline of the pipeline schedule."""
    from fivefold.observe import layout_picture
    from fivefold.recipe import expected_vocab_size, load, resolve
    from fivefold.schedules.pipeline import to_svg, to_text
    from fivefold.spread.layout import Layout

    loaded = load(recipe, set_ or [], layout)
    loaded = resolve(loaded, vocab_size=expected_vocab_size(loaded) or VOCABULARY)
    wanted = Layout.from_recipe(loaded.layout)
    timeline, title = pipeline(loaded, wanted), Path(recipe).stem
    text, pictures = layout_picture.to_text(loaded, wanted), {}
    if timeline is not None:
        color = sys.stdout.isatty() and not json
        columns = max(40, min(160, shutil.get_terminal_size().columns) - 24)
        words = f"{timeline.bubble:.1%} idle, if backward takes twice as long as forward"
        text += f"\nschedule {wanted.schedule}: {words}\n"
        text += to_text(timeline, columns, color)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        pictures["layout"] = out / "layout.svg"
        pictures["layout"].write_text(layout_picture.to_svg(loaded, wanted, title), encoding="utf-8")
        if timeline is not None:
            pictures["schedule"] = out / "schedule.svg"
            pictures["schedule"].write_text(to_svg(timeline, wanted.schedule), encoding="utf-8")
    if json:
        print_json({"text": text, "pictures": {name: str(path) for name, path in pictures.items()}})
        return
    print(text, end="")
    for path in pictures.values():
        print(path)


def pipeline(recipe: Recipe, layout: Layout) -> Timeline | None:
    """The simulated timeline of one step. Forward takes 1, backward 2, transfers 0. None without a pipeline."""
    from fivefold.recipe import microbatches_per_step
    from fivefold.schedules.pipeline import build, simulate

    if layout.pp == 1:
        return None
    return simulate(build(layout.schedule, layout.pp, microbatches_per_step(recipe), layout.virtual_stages))
