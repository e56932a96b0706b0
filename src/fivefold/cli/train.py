"""`fivefold train RECIPE`: trains a recipe, or resumes a run."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fivefold.cli.options import (
    JsonOption,
    LayoutOption,
    RecipeArgument,
    SetOption,
    flag,
    option,
    print_json,
)
from fivefold.errors import UserError
from fivefold.files import guard
from fivefold.launch.verdict import Leaving

if TYPE_CHECKING:
    from fivefold.recipe import Recipe

EXAMPLES = [
    "fivefold train quickstart",
    "fivefold train shakespeare --set data.source=my.txt --set train.steps=500",
    "fivefold train quickstart --nproc 4 --out runs/first",
    "fivefold train runs/first --resume",
    "fivefold train quickstart --out runs/first --resume-from auto",
    "fivefold train runs/first --resume-from runs/first/checkpoints/step-00000040",
    "fivefold train quickstart --quiet",
]
NprocOption = Annotated[
    str | None,
    option(
        "N|MIN:MAX",
        "Number of local ranks to start. MIN:MAX: elastic; ranks that fail for good are left out, and "
        "RUN/slots says how many may run now. [default: as the layout and the machine need]",
    ),
]
GROUPS = {"Ranks": ("nproc", "site", "meet"), "Run folder": ("out", "resume", "resume_from")}


@Leaving()
def train(
    recipe: RecipeArgument,
    set_: SetOption = None,
    layout: LayoutOption = None,
    nproc: NprocOption = None,
    out: Annotated[Path | None, option("DIR", "Run folder. [default: a new one under runs/]")] = None,
    site: Annotated[
        int | None,
        option(
            "N",
            "Train this site of the recipe's only. Each is started by itself, and may leave and return.",
            min=0,
        ),
    ] = None,
    meet: Annotated[str | None, option("HOST:PORT", "With --site: where site 0 serves the others.")] = None,
    resume: Annotated[bool, flag("Resume from the run's last checkpoint.", "--resume")] = False,
    resume_from: Annotated[
        str | None,
        option(
            "auto|PATH",
            "auto: resume if the run has a checkpoint, else start it. PATH: resume from this checkpoint; later "
            "ones of the run are set aside.",
        ),
    ] = None,
    quiet: Annotated[
        bool, flag("Print alarms and errors only, and the run folder at the end.", "--quiet")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Train a recipe.

    Starts its own ranks on this machine, or uses those of torchrun, Slurm or mpirun. To resume an
    interrupted run, pass its folder as RECIPE with --resume.
    """
    ranks_wanted = between(nproc) if nproc else None
    path = Path(recipe)
    again = resume or resume_from is not None
    if again and (path / "recipe.toml").is_file():  # `fivefold train RUN --resume`
        guard(path)
        out, path = out or path, path / "recipe.toml"
        recipe = str(path)
    loaded = _load(recipe, set_ or [], layout, again)
    # Imported once the recipe is known to be good: torch takes more than a second
    from fivefold.launch import ranks
    from fivefold.train.start import run_command, seat_of

    seat = seat_of(loaded, site, meet)
    run = partial(run_command, loaded, ranks_wanted, out, resume, resume_from, name=path.stem, seat=seat)
    if not json and not quiet:
        run()
        return
    with contextlib.redirect_stdout(sys.stderr), _quiet(quiet):  # the ranks inherit both
        folder = run()
    launched = ranks.found()
    if launched is not None and launched[0] != 0:  # every rank of a foreign launcher gets here
        return
    print_json(_results(folder)) if json else print(folder)


def between(text: str) -> int | tuple[int, int]:
    """Reads `N` or `MIN:MAX`, numbers of ranks.

    Raises:
        UserError: it is neither.
    """
    least, colon, most = text.partition(":")
    numbers = [least, most] if colon else [least, least]
    if not all(n.isascii() and n.isdigit() and len(n) < 8 for n in numbers):
        raise UserError(
            f"--nproc {text[:40]}: must be a number of ranks, N, or the fewest and the most, MIN:MAX"
        )
    first, last = map(int, numbers)
    if not 1 <= first <= last:
        raise UserError(
            f"--nproc {text}: must be at least 1, and MIN at most MAX. Nearest valid: {max(1, last)}"
        )
    return (first, last) if colon else first


def _load(recipe: str, sets: list[str], layout: str | None, again: bool) -> Recipe:
    """The recipe to train; again: of a run that may have had another layout."""
    from fivefold.recipe import load

    try:
        return load(recipe, sets, layout)
    except UserError:
        if not again or layout is None:
            raise
        # The saved microbatch size fitted a rank's share in the old layout; let it be chosen again.
        return load(recipe, ["train.microbatch_size=none", *sets], layout)


def _results(folder: Path) -> dict[str, Any]:
    """The figures of a run that ended."""
    from fivefold.observe.faults import restart_figures
    from fivefold.observe.metrics import read_metrics
    from fivefold.observe.summary import summarize

    figures = {**summarize(read_metrics(folder)), **restart_figures(folder)}
    return {"run": str(folder), "report": str(folder / "report.html"), **figures}


@contextlib.contextmanager
def _quiet(wanted: bool) -> Iterator[None]:
    """Inside the block the console prints alarms only."""
    from fivefold.observe.console import QUIET

    before = os.environ.get(QUIET)
    if wanted:
        os.environ[QUIET] = "1"
    try:
        yield
    finally:
        if wanted and before is None:
            del os.environ[QUIET]
