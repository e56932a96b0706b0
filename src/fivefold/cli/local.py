"""`fivefold plan` on the machine at hand: measured on first use, calibrated by finished runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fivefold.cli.options import print_json, require_run
from fivefold.errors import UserError


def ensure_measured(cluster: str) -> None:
    """Measures this machine, in a process of its own, where `cluster` is the local one and nothing was measured yet.

    Raises:
        UserError: it did not work.
    """
    from fivefold.plan import measured

    if cluster.lower().partition(":")[0] != "local" or measured.load() is not None:
        return
    print(
        "note: this machine is not measured yet: that takes about two minutes, once (`fivefold bench hardware` does "
        "it again)",
        file=sys.stderr,
    )
    command = [sys.executable, "-m", "fivefold.cli.main", "bench", "hardware", "--json"]
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise UserError("cluster 'local': measuring this machine failed; its message stands above")


def run_calibration(names: Sequence[str], json: bool) -> None:
    """`--calibrate RUN...`, or `--calibrate reset`."""
    from fivefold.plan import measured
    from fivefold.plan.calibrate import describe, fit

    table = measured.load()
    if table is None:
        raise UserError("--calibrate: this machine is not measured yet: run `fivefold bench hardware` first")
    if list(names) == ["reset"]:
        measured.save(replace(table, factors=dict.fromkeys(measured.FACTORS, 1.0), fitted=[]))
        print_json({"factors": None}) if json else print("predictions follow the measured table alone again")
        return
    found = fit(table, [_run(Path(name)) for name in names])
    measured.save(found.table)
    print_json(found.as_json()) if json else print("\n".join(describe(found)))


def _run(folder: Path):
    from fivefold.observe.metrics import read_metrics
    from fivefold.observe.prediction import step_seconds
    from fivefold.plan.calibrate import Run
    from fivefold.recipe import load

    require_run(folder)
    seconds = step_seconds(read_metrics(folder / "metrics.jsonl"))
    if seconds is None:
        raise UserError(f"--calibrate: {folder} has too few steps: at least 3")
    return Run(folder.name, load(str(folder / "recipe.toml")), seconds)
