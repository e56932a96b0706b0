"""`fivefold sweep RECIPE --over ...`: trains a recipe with several values of a few fields, and fits what came out."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.options import JsonOption, LayoutOption, SetOption, option, print_json
from fivefold.errors import UserError
from fivefold.files import numbered_folder
from fivefold.launch.verdict import STOPPED, Leaving, run_complete

EXAMPLES = [
    'fivefold sweep quickstart --over "model.dim=64,128 model.heads=2,4" --over train.tokens=200000,400000,800000',
    "fivefold sweep quickstart --over model.dim=64,96,128 --over flops=1e12,4e12 --jobs 2 --out runs/budgets",
    "fivefold sweep quickstart --over optim.lr=1e-3,2e-3,4e-3 --set train.steps=100",
    "fivefold sweep runs/budgets",
]
HoldOutOption = Annotated[
    str | None,
    option(
        "largest|size|NAME",
        "Leave runs out of the fit and predict them: the one with most FLOPs, all of the largest size, or the run "
        "of this name.",
        "--hold-out",
    ),
]


@Leaving()
def sweep(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A recipe, by name or path; or a sweep's folder, to resume it."
        ),
    ],
    over: Annotated[
        list[str] | None,
        option(
            "KEY=VALUE,VALUE...",
            "Values of a field. Repeatable: all combinations are run. Fields in one --over, with a space between, "
            "move together. flops=...: 6 N D of a run, which sets its train.tokens.",
        ),
    ] = None,
    set_: SetOption = None,
    layout: LayoutOption = None,
    jobs: Annotated[int, option("N", "Runs at a time.", min=1, max=1024)] = 1,
    out: Annotated[Path | None, option("DIR", "Sweep folder. [default: a new one under runs/]")] = None,
    hold_out: HoldOutOption = None,
    json: JsonOption = False,
) -> None:
    """Train a grid of runs, resume it, and fit a scaling law to it.

    Runs that are finished are not run again, interrupted ones resume. All values are checked before anything runs. A
    run that fails is reported, and the others go on.
    """
    from fivefold.recipe import sweep as table

    folder, made, base = _open(recipe, over or [], set_ or [], layout, out)
    for row in made.rows:  # all values, before torch is imported
        made.load(base, row)
    from fivefold.plan.advice.scaling import check_hold_out, results
    from fivefold.plan.pages import sweep as page
    from fivefold.train.sweep import plan, run

    say = partial(print, file=sys.stderr if json else sys.stdout, flush=True)
    check_hold_out(made, hold_out)
    plan(made, base)
    if folder is None:
        folder = numbered_folder(Path("runs"), f"{Path(recipe).stem}-sweep")
    table.write(folder, made)
    finished = sum(row.status == table.FINISHED for row in made.rows)
    say(f"{folder}: {len(made.rows)} runs" + (f", {finished} finished before" if finished else ""))
    code = run(folder, made, jobs, say)
    run_complete()
    if code == STOPPED:  # whoever stopped it may wait for a few seconds only
        print(f"stopped; resume with: fivefold sweep {folder}", file=sys.stderr)
        raise typer.Exit(code)
    found = results(made, hold_out)
    path = page.write(folder, found)
    if json:
        print_json({"sweep": str(folder), "report": str(path), **found.as_json()})
    else:
        print(found.text())
        print(path)
        if code:
            print(f"try again with: fivefold sweep {folder}")
    raise typer.Exit(code)


def _open(recipe: str, over: list[str], overrides: list[str], layout: str | None, out: Path | None):
    """The sweep's folder (None: a new one), the sweep, and where its recipe stands."""
    from fivefold.recipe import sweep as table

    path = Path(recipe)
    if table.is_sweep(path):
        if over or overrides or layout or out:
            raise UserError(
                f"'{recipe}' is a sweep, which resumes as it was made. To add runs, repeat its own command with more "
                f"values after --over, and --out {recipe}"
            )
        return path, table.read(path), path / table.BASE
    if not over:
        raise UserError(
            "a sweep needs --over, such as --over model.dim=64,128 --over train.tokens=200000,400000"
        )
    if out is None or not table.is_sweep(out):
        if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"--out {out}: this is no sweep, and not an empty folder; choose another --out")
        return out, table.make(recipe, overrides, layout, over), recipe
    before = table.read(out)
    made = table.make(recipe, overrides, layout, over, before.rows)
    for name, old, new in (
        ("the recipe", before.base, made.base),
        ("--set", before.overrides, made.overrides),
        ("--layout", before.layout, made.layout),
    ):
        if old != new:
            raise UserError(
                f"--out {out} holds a sweep with another {name.removeprefix('the ')}; resume it with `fivefold sweep "
                f"{out}`, or choose another --out"
            )
    return out, made, recipe
