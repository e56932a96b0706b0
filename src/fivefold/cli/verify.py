"""`fivefold verify RECIPE --layout L`: checks that a layout computes the same as one process."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Literal

from fivefold.cli.options import (
    JsonOption,
    LayoutOption,
    RecipeArgument,
    SetOption,
    flag,
    option,
    print_json,
)
from fivefold.errors import CheckFailed, several
from fivefold.precision import PRECISIONS

if TYPE_CHECKING:
    from fivefold.train.verify import Report

    Mode = str
else:
    Mode = Literal[tuple(PRECISIONS)]

EXAMPLES = [
    "fivefold verify quickstart --layout dp=2",
    "fivefold verify quickstart --layout tp=2,pp=2 --set train.global_batch_size=8 --json",
    "fivefold verify my.toml --layout dp=2,zero=3 --mode bf16",
]
NAMES = {"loss": "loss", "gradients": "gradients", "grad_norm": "gradient norm", "weights": "weights"}


def verify(
    recipe: RecipeArgument,
    set_: SetOption = None,
    layout: LayoutOption = None,
    steps: Annotated[int, option("N", "Optimizer steps to compare.", min=1)] = 3,
    mode: Annotated[
        Mode, flag("fp32: equal up to rounding. Others: as close to fp32 as one process in that mode.")
    ] = "fp32",
    json: JsonOption = False,
) -> None:
    """Check that a layout computes the same as one process.

    Both train a few steps on the same batches. The losses, every gradient, the gradient norm and every weight are
    compared. The exit code is 1 if any of them differs by more than rounding.
    """
    from fivefold.recipe import load

    loaded = load(recipe, set_ or [], layout)
    # Imported once the recipe is known to be good: torch takes more than a second
    from fivefold.train.verify import verify as run

    with contextlib.redirect_stdout(sys.stderr):  # the forked ranks inherit it
        report = run(loaded, steps=steps, mode=mode, fork=True)
    if report is None:  # a rank of torchrun that is not the first
        return
    if json:
        print_json(report.as_json())
    else:
        print("\n".join(text(recipe, report)))
    if not report.passed:
        wrong = ", ".join(NAMES[name] for name, figure in report.figures.items() if not figure.passed)
        raise CheckFailed(f"{report.layout} does not compute the same as one process: {wrong}")


def text(name: str, report: Report) -> list[str]:
    """The report for people."""
    lines = [
        f"{name}: {report.layout} on {several(report.ranks, 'rank')} against one process, "
        f"{several(report.steps, 'step')} in {report.mode}",
        f"  {'':14}  {'difference':>10}  {'allowed':>8}        largest at",
    ]
    for key, figure in report.figures.items():
        verdict = "ok" if figure.passed else "WRONG"
        lines.append(
            f"  {NAMES[key]:14}  {figure.max_rel:10.1e}  {figure.allowed:8.1e}  {verdict:5} {figure.worst}"
        )
    lines += [f"  note: {note}" for note in report.notes]
    if report.passed:
        lines.append(f"{report.layout} computes the same as one process")
    return lines
