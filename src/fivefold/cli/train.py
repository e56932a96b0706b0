"""`fivefold train RECIPE` trains a recipe, or resumes a run. `fivefold sweep RECIPE --over ...` trains it with several
values of a few fields, and fits what came out. `fivefold verify RECIPE --layout L` checks that a layout computes the
same as one process."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fivefold import wings
from fivefold.cli import options
from fivefold.cli.options import flag, option, print_json
from fivefold.errors import CheckFailed, UserError, several
from fivefold.files import guard, numbered_folder
from fivefold.launch.verdict import STOPPED, Leaving, run_complete
from fivefold.precision import PRECISIONS

if TYPE_CHECKING:
    from fivefold.comm.membership import Endpoint
    from fivefold.recipe import Recipe


NprocOption = Annotated[
    str | None,
    option(
        "N|MIN:MAX",
        "Number of local ranks to start. MIN:MAX: elastic; ranks that fail for good are left out, and "
        "RUN/slots says how many may run now. [default: as the layout and the machine need]",
    ),
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
GROUPS = {"Ranks": ("nproc", "replica_group", "meet"), "Run folder": ("out", "resume", "resume_from")}


@Leaving()
def train(
    recipe: options.RecipeArgument,
    set_: options.SetOption = None,
    layout: options.LayoutOption = None,
    nproc: NprocOption = None,
    out: Annotated[Path | None, option("DIR", "Run folder. [default: a new one under runs/]")] = None,
    replica_group: Annotated[
        int | None,
        option("N", "Train this one only. Each is started by itself, may leave and return.", min=0),
    ] = None,
    meet: Annotated[
        str | None, option("HOST:PORT", "With --replica-group: where replica group 0 serves the others.")
    ] = None,
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
    json: options.JsonOption = False,
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
    from fivefold.observe.console import quietly
    from fivefold.train.start import run_command

    endpoint = endpoint_of(loaded, replica_group, meet)
    run = partial(
        run_command, loaded, ranks_wanted, out, resume, resume_from, name=path.stem, endpoint=endpoint
    )
    if not json and not quiet:
        run()
        return
    with contextlib.redirect_stdout(sys.stderr), quietly("1" if quiet else ""):  # the ranks inherit both
        folder = run()
    launched = ranks.found()
    if launched is not None and launched[0] != 0:  # every rank of a foreign launcher gets here
        return
    print_json(_results(folder)) if json else print(folder)


def _results(folder: Path) -> dict[str, Any]:
    """The figures of a run that ended."""
    from fivefold.observe.faults import restart_figures
    from fivefold.observe.metrics import read_metrics
    from fivefold.observe.summary import summarize

    figures = summarize(read_metrics(folder)) | restart_figures(folder)
    return {"run": str(folder), "report": str(folder / "report.html"), **figures}


def endpoint_of(recipe: Recipe, replica_group: int | None, address: str | None) -> Endpoint | None:
    """The endpoint that `--replica-group` and `--meet` name; None without them. Raises UserError: the recipe has no
    such replica group, or one of the options is missing."""
    if replica_group is None and address is None:
        return None
    if replica_group is None or address is None:
        raise UserError(
            "--replica-group N and --meet HOST:PORT go together: the group's number, and where group 0 serves"
        )
    from fivefold.comm.membership import Endpoint
    from fivefold.train.faults import goes_back

    count = recipe.replica_groups.count
    if count == 1:
        raise UserError(
            "--replica-group: the recipe has one. Add --layout dp=2 and --set sync.method=diloco, for example"
        )
    if replica_group >= count:
        raise UserError(
            f"--replica-group {replica_group}: the recipe has {count}, 0 to {count - 1}. Nearest valid: {count - 1}"
        )
    if goes_back(recipe.faults):
        raise UserError(
            'faults: "rollback" is not supported with --replica-group: no group can go back without the others. '
            'Nearest valid: "skip" or "abort"'
        )
    if recipe.sync.overlap:
        raise UserError(
            f"sync.overlap = {recipe.sync.overlap} is not supported with --replica-group. "
            "Nearest valid: sync.overlap = 0"
        )
    return Endpoint.parse(replica_group, address)


def between(text: str) -> int | tuple[int, int]:
    """Reads `N` or `MIN:MAX`, numbers of ranks. Raises UserError: it is neither."""
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
    set_: options.SetOption = None,
    layout: options.LayoutOption = None,
    jobs: Annotated[int, option("N", "Runs at a time.", min=1, max=1024)] = 1,
    out: Annotated[Path | None, option("DIR", "Sweep folder. [default: a new one under runs/]")] = None,
    hold_out: HoldOutOption = None,
    json: options.JsonOption = False,
) -> None:
    """Train a grid of runs, resume it, and fit a scaling law to it.

    Runs that are finished are not run again, interrupted ones resume. All values are checked before anything runs. A
    run that fails is reported, and the others go on.
    """
    from fivefold.recipe import sweep as table

    folder, made, base = _open(recipe, over or [], set_ or [], layout, out)
    for row in made.rows:  # all values, before torch is imported
        made.load(base, row)
    from fivefold.train.sweep import plan, run

    say = partial(print, file=sys.stderr if json else sys.stdout, flush=True)
    scaling, pages = wings.part("scaling"), wings.part("pages")
    scaling.check_hold_out(made, hold_out)
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
    found = scaling.results(made, hold_out)
    path = pages.write_sweep(folder, found)
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


if TYPE_CHECKING:
    from fivefold.train.verify import Report

    Mode = str
else:
    Mode = Literal[tuple(PRECISIONS)]

NAMES = {
    "loss": "loss", "gradients": "gradients", "grad_norm": "gradient norm", "weights": "weights",
    "gradient_scale": "gradient scale", "moments": "optimizer", "auxiliary": "other figures",
    "validation": "validation", "copies": "copies",
}  # fmt: skip


def verify(
    recipe: options.RecipeArgument,
    set_: options.SetOption = None,
    layout: options.LayoutOption = None,
    steps: Annotated[int, option("N", "Optimizer steps to compare.", min=1)] = 3,
    mode: Annotated[
        Mode, flag("fp32: equal up to rounding. Others: as close to fp32 as one process in that mode.")
    ] = "fp32",
    share_gpus: Annotated[
        bool, flag("Let several ranks share a GPU, with gloo instead of NCCL: slow.", "--share-gpus")
    ] = False,
    json: options.JsonOption = False,
) -> None:
    """Check that a layout computes the same as one process.

    Both train a few steps on the same batches. The losses, every gradient, the gradient norm, every weight, the
    optimizer's states, further figures, a validation and the copies that ranks keep are compared. The exit code is 1 if
    any of them differs by more than rounding.
    """
    from fivefold.recipe import load

    loaded = load(recipe, set_ or [], layout)
    # Imported once the recipe is known to be good: torch takes more than a second
    from fivefold.train.verify import verify as run

    with contextlib.redirect_stdout(sys.stderr):  # the forked ranks inherit it
        report = run(loaded, steps=steps, mode=mode, fork=True, share_gpus=share_gpus)
    if report is None:  # a rank of torchrun that is not the first
        return
    print_json(report.as_json()) if json else print("\n".join(text(recipe, report)))
    if not report.passed:
        wrong = ", ".join(NAMES[name] for name, figure in report.figures.items() if not figure.passed)
        raise CheckFailed(f"{report.layout} does not compute the same as one process: {wrong}")


def text(name: str, report: Report) -> list[str]:
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
