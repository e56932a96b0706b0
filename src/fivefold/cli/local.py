"""Plans for this machine: it is measured at first use; `fivefold plan calibrate` fits its table to finished runs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.options import JsonOption, print_json, require_run
from fivefold.errors import UserError

EXAMPLES = ["fivefold plan calibrate runs/a runs/b", "fivefold plan calibrate reset"]


def ensure_measured(cluster: str) -> None:
    """If `cluster` is `local` and there is no table yet, asks whether to measure this machine, in a separate process.

    Raises:
        UserError: there is no terminal to ask, or the measurement failed.
    """
    from fivefold.plan.cluster import measured

    if cluster.lower().partition(":")[0] != "local" or measured.load() is not None:
        return
    missing = f"cluster '{cluster}': this machine has not been measured"
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        raise UserError(f"{missing}; run `fivefold bench hardware` first, which takes about two minutes")
    print(
        f"{missing}. Measure it now? It takes about two minutes [Y/n] ", end="", file=sys.stderr, flush=True
    )
    if sys.stdin.readline().strip().lower() not in ("", "y", "yes"):
        raise UserError(f"{missing}; `fivefold bench hardware` does")
    command = [sys.executable, "-P", "-m", "fivefold", "bench", "hardware", "--json"]
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise UserError(f"{missing}: that failed; see the message above")


def calibrate(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="Run folders, or the word reset.")],
    json: JsonOption = False,
) -> None:
    """Fit this machine's table to finished runs, or remove what was fitted (`plan calibrate reset`)."""
    from fivefold.plan.cluster import measured
    from fivefold.plan.cluster.calibrate import describe, fit

    table = measured.load()
    if table is None:
        raise UserError(
            "plan calibrate: this machine has not been measured; run `fivefold bench hardware` first"
        )
    if runs == ["reset"]:
        measured.save(replace(table, factors=dict.fromkeys(measured.FACTORS, 1.0), fitted=[]))
        print_json({"factors": None}) if json else print(
            "calibration removed; predictions use the measured table alone"
        )
        return
    found = fit(table, [_run(Path(name)) for name in runs])
    measured.save(found.table)
    print_json(found.as_json()) if json else print("\n".join(describe(found)))


def _run(folder: Path):
    from fivefold.observe.metrics import read_metrics
    from fivefold.observe.prediction import step_seconds
    from fivefold.plan.cluster.calibrate import FinishedRun
    from fivefold.recipe import load

    require_run(folder)
    seconds = step_seconds(read_metrics(folder / "metrics.jsonl"))
    if seconds is None:
        raise UserError(f"plan calibrate: {folder} has too few steps; it needs at least 3")
    return FinishedRun(folder.name, load(str(folder / "recipe.toml")), seconds)
