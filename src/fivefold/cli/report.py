"""`fivefold report RUN ...`: writes the page of a run, of several runs side by side, or of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.options import (
    JsonOption,
    flag,
    option,
    print_json,
    require_run,
    require_writable,
    run_folders,
    save_as,
)
from fivefold.cli.sweep import HoldOutOption
from fivefold.errors import UserError

EXAMPLES = [
    "fivefold report runs/first",
    "fivefold report runs/first --live",
    "fivefold report runs/first runs/second --out both.html",
    "fivefold report runs/quickstart-sweep-1 --hold-out largest",
]
COMPARISON = Path("comparison.html")


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Run folders, or a sweep's folder.", autocompletion=run_folders),
    ],
    out: Annotated[Path | None, option("FILE", f"Page of several runs. [default: {COMPARISON}]")] = None,
    hold_out: HoldOutOption = None,
    live: Annotated[
        bool, flag("Serve the page of a run on this machine while it trains, until Ctrl-C.", "--live")
    ] = False,
    port: Annotated[
        int | None, option("N", "With --live; 0: a free one. [default: 6007]", min=0, max=65535)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write the report of a run: one HTML file that opens offline.

    Several runs are compared: losses over steps, tokens, time and FLOPs, figures, and where their recipes differ.
    A sweep's page has its law, isoFLOP curves and the best value of each field.
    """
    from fivefold.recipe import sweep as table

    sweeps = [run for run in runs if table.is_sweep(run)]
    if sweeps and len(runs) > 1:
        raise UserError(
            f"'{sweeps[0]}' is a sweep, which has a page of its own; compare its runs: {sweeps[0]}/*/"
        )
    if hold_out is not None and not sweeps:
        raise UserError(f"--hold-out {hold_out}: only a sweep has a fit; '{runs[0]}' is none")
    if out is not None and len(runs) == 1:
        raise UserError(f"--out {out}: the page of one run or sweep lies in its folder, as report.html")
    if port is not None and not live:
        raise UserError(f"--port {port}: only --live listens on a port")
    if live and (sweeps or len(runs) > 1 or json):
        raise UserError("--live serves the page of one run, without --json. Name one run folder")
    if sweeps:
        _sweep(sweeps[0], hold_out, json)
        return
    for run in runs:
        require_run(run, look=False)
    if len(runs) > 1:
        _compare(runs, out or COMPARISON, json)
        return
    if live:
        from fivefold.observe.live import PORT, serve

        serve(runs[0], PORT if port is None else port)
        return
    from fivefold.observe.report import write_report

    path = write_report(runs[0])
    print_json({"report": str(path)}) if json else print(path)


def _compare(runs: list[Path], path: Path, json: bool) -> None:
    from fivefold.observe import compare

    require_writable("--out", path)
    found = compare.read_runs(runs)
    save_as("--out", path, compare.page(found))
    if json:
        print_json({"report": str(path), **compare.as_json(found)})
    else:
        print(compare.text(found))
        print(path)


def _sweep(folder: Path, hold_out: str | None, json: bool) -> None:
    from fivefold.files import guard
    from fivefold.plan.advice.scaling import results, rows_text
    from fivefold.plan.pages import sweep as page
    from fivefold.recipe import sweep as table

    guard(folder)
    found = results(table.read(folder), hold_out)
    path = page.write(folder, found)
    if json:
        print_json({"report": str(path), **found.as_json()})
    else:
        print(rows_text(found.sweep))
        print(found.text())
        print(path)
