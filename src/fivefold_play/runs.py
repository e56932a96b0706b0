"""Runs: those of the folders with their figures, side by side, as Hugging Face folders and as one file to send."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from starlette.responses import Response
from starlette.routing import Route

from fivefold.errors import UserError, did_you_mean, printable
from fivefold.files import numbered_folder, parse_json, remove
from fivefold.observe.compare import AXES, FIGURES, drawn, read_runs, row, side_by_side
from fivefold.observe.report import page
from fivefold.recipe.sweep import read
from fivefold_plan.advice.scaling import results
from fivefold_plan.pages.sweep import view
from fivefold_play.state import Params, State, condition, events, get, post, stamp
from fivefold_play.train import command

MOST, POINTS = 50, 2000
"""Runs side by side, and points of a curve."""


def routes(state: State) -> list[Route]:
    return [
        events("/api/runs/rows", lambda given: rows(state)),
        get("/api/runs/compare", lambda given: compare(state, given)),
        get("/api/runs/sweep", lambda given: sweep(state, given.get("sweep"))),
        get("/api/runs/report", lambda given: report(state.run(given.get("run")))),
        post("/api/runs/export", lambda given: export(state, state.run(given.get("run")))),
    ]


def rows(state: State) -> Iterator[Any]:
    """{names, sweeps, figures: {key: title}}, then a row for each run, {name, kind, step, steps, layout, arch,
    figures: {key: number}, shown: {key: text}}. Each comes again when it has changed."""
    known, names = dict[str, Any](), None
    titles = {key: title for key, (title, _) in FIGURES.items()}
    while True:
        runs = state.runs()
        if names != (names := [*runs]):
            known = {name: one for name, one in known.items() if name in runs}
            yield {"names": names, "sweeps": [*state.sweeps()], "figures": titles}
        for name, run in runs.items():
            now = {"name": name, **condition(run), **_figures(run, stamp(run))}
            if now != known.get(name):
                known[name] = now
                yield now
        yield None


@lru_cache(500)
def _figures(run: Path, stamp: tuple[object, ...]) -> dict[str, Any]:
    try:
        return row(*read_runs([run]))
    except (UserError, OSError) as error:  # no metrics yet, or broken ones
        return {"problem": str(error)}


def compare(state: State, given: Params) -> dict[str, Any]:
    """given: runs, the names as a JSON list; axis, one of AXES. Returns `side_by_side` and `drawn`."""
    try:
        names = parse_json(given.get("runs", ""))
    except (ValueError, RecursionError):
        names = None
    axis = given.get("axis", AXES[0])
    if not isinstance(names, list) or not 1 <= len(names) <= MOST or axis not in AXES:
        raise UserError(f"runs: 1 to {MOST} names as a JSON list; axis: {', '.join(AXES)}")
    found = read_runs([state.run(name) for name in names])
    return side_by_side(found) | drawn(found, axis, POINTS)


def sweep(state: State, name: object) -> dict[str, Any]:
    """What a sweep has found (`fivefold_plan/pages/sweep.view`)."""
    sweeps = state.sweeps()
    if not isinstance(name, str) or name not in sweeps:
        raise UserError(f"there is no sweep '{name}'{did_you_mean(str(name), sweeps)}")
    return view(sweeps[name], results(read(sweeps[name])))


def report(run: Path) -> Response:
    """The run's report, one file that opens offline, to keep or to send."""
    name = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in run.name)
    now = condition(run)
    state = f"training, step {now['step']:,}" if now["kind"] == "training" else ""
    headers = {"Content-Disposition": f'attachment; filename="{name}-report.html"'}
    return Response(page(run, state).encode("utf-8", "replace"), media_type="text/html", headers=headers)


def export(state: State, run: Path) -> dict[str, Any]:
    """Writes the run's weights as a Hugging Face folder beside it, by the command. Returns {folder, command}."""
    folder = numbered_folder(state.home, f"{run.name}-hf")
    words = ["export", str(run), str(folder)]
    try:
        state.commands.start("export", words, replace=False).result()
    except UserError:
        remove(folder)
        raise
    return {"folder": printable(str(folder)), "command": command(words)}
