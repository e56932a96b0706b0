"""Parts of the page as one file that opens offline, with recorded answers, which are compressed.

"Machine": the answers of `machine.answer` on a grid around a plan. Its sliders are those of the page, with fewer
values. Nothing is interpolated. Equal parts of answers are kept once. "Runs": some runs side by side, or a sweep.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import product
from pathlib import Path
from typing import Any

from fivefold.draw.canvas import STYLE, css
from fivefold.errors import UserError, printable
from fivefold.files import guard, write_atomically
from fivefold.observe.compare import AXES, FIGURES, ComparedRun, drawn, read_runs, row, side_by_side
from fivefold.observe.format import asset, document, header
from fivefold_plan.advice.scaling import Results
from fivefold_plan.pages.pictures import as_rows, frontier_svg
from fivefold_plan.pages.sweep import finished, view
from fivefold_plan.predict import Plan
from fivefold_play.machine import answer
from fivefold_play.position import Position

BUDGET = 300
"""Answers of a grid: less than 20 seconds and 3 MB (tests/test_play_recorded.py)."""
OFTEN = ("tp", "pp", "zero", "devices")
TURNS = (*OFTEN, "microbatch", "recompute", *OFTEN, "batch", "seq_len")
"""The order in which sliders get further values."""
PIXELS = 540  # of a picture
FEWEST, POINTS = 40, 4000
"""Points of a curve at least, and of all runs together."""
Grid = dict[str, list[str]]
OPEN = """
const open = async () => {
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  await show(document.getElementById("root"), { recorded: true, ...answering(await new Response(stream).json()) });
};
open().catch((error) => tell(error.message, true));
"""
PLAN = """
const answering = ({ grid, answers, parts, first }) => ({ get: async (path, given) => {
  if (path !== "machine/plan") return { recipes: {}, families: {}, measured: true, position: first };
  const at = { ...given, ...(given.move && { [given.move]: given.to }) };
  const cell = Object.entries(grid).reduce((cell, [key, some]) => cell * some.length + some.indexOf(at[key]), 0);
  return Object.fromEntries(Object.entries(answers[cell]).map(([name, part]) => [name, parts[part]]));
} });
"""
RUNS = """
const answering = ({ rows, compared, axes, sweep, place }) => ({ place, get: async (path, given) => {
  if (path === "runs/sweep") return sweep;
  const { runs, notes } = compared, names = JSON.parse(given.runs), kept = runs.map((run) => names.includes(run.run));
  const some = (all) => all.filter((_, i) => kept[i]);
  const differences = Object.entries(compared.differences).map(([key, values]) => [key, some(values)]);
  const of = "Notes, bold figures and the scale of the axis are those of all runs of this file.";
  return { ...compared, ...axes[given.axis], runs: some(runs), notes: kept.every(Boolean) ? notes : [...notes, of],
    differences: Object.fromEntries(differences.filter(([, values]) => new Set(values).size > 1)) };
}, events: (path, tell) => { rows.forEach(tell); return () => {}; } });
"""


def grid(at: Position, budget: int) -> Grid:
    """The values of each slider: those that are nearest to its own in turn, as far as the budget goes."""
    own = {one["key"]: one for one in answer(at, {})["controls"]}
    chosen = {key: [own[key]["values"][own[key]["at"]]] for key in TURNS}
    waiting = {key: _nearest(key, own[key]["values"], own[key]["at"]) for key in TURNS}
    while any(waiting.values()):
        for key in TURNS:
            if waiting[key]:
                more = [*chosen[key], waiting[key].pop(0)]
                if math.prod(len(some) for some in (chosen | {key: more}).values()) <= budget:
                    chosen[key] = more
    return {key: sorted(values, key=own[key]["values"].index) for key, values in chosen.items()}


def _nearest(key: str, values: Sequence[str], at: int) -> list[str]:
    """The other values of a slider, those first that are near. ZeRO's stages by how common they are."""
    places = sorted(range(len(values)), key=lambda place: (abs(place - at), -place))
    found = [values[place] for place in places[1:]]
    return sorted(found, key="1302".index) if key == "zero" else found


def answers(at: Position, chosen: Grid, own: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The answer at each place of the grid, whose last slider moves fastest. Its position says where the sliders stand;
    those that the grid does not move have one value. own: where they stand at the position."""
    known: dict[Any, Any] = {}
    for values in product(*chosen.values()):
        place = dict(zip(chosen, values, strict=True))
        # devices first: dp takes what the other axes leave
        moves = {key: place[key] for key in ("devices", *chosen) if place[key] != own[key]}
        found: dict[str, Any] = answer(at, moves, PIXELS, known, nearby=False)
        there = found.get("position", at.as_json())
        kept = [_kept(one, chosen, place) for one in found.get("controls", [])]
        yield found | {"position": {**place, "layout": there["layout"]}, "controls": kept}


def _kept(one: dict[str, Any], chosen: Grid, place: Mapping[str, str]) -> dict[str, Any]:
    """A slider with the values of the grid."""
    key, words = one["key"], dict(zip(one["values"], one["words"], strict=True))
    if key in chosen:
        at, values = chosen[key].index(place[key]), chosen[key]
        return one | {"values": values, "words": [words.get(v, v) for v in values], "at": at}
    now = one["values"][one["at"]]
    return one | {"values": [now], "words": [words[now]], "at": 0}


def page(
    at: Position, name: str, lead: str, frontier: Sequence[Plan] = (), budget: int = 0
) -> tuple[str, int]:
    """(the page as HTML, the number of its answers). name: the recipe's. lead: the plan in a sentence. frontier: of a
    search, whose best plan is at the position. Raises UserError: there is no plan at the position."""
    own = answer(at, {}, PIXELS)
    if "pictures" not in own:
        raise UserError(own["problem"])
    at = replace(at, layout=own["position"]["layout"], cluster=own["position"]["cluster"])
    chosen, parts = grid(at, budget or BUDGET), dict[str, int]()
    first = {one["key"]: one["values"][one["at"]] for one in own["controls"] if one["key"] in chosen}
    cells = [
        {name: parts.setdefault(json.dumps(part), len(parts)) for name, part in one.items()}
        for one in answers(at, chosen, first)
    ]
    data = {"grid": chosen, "answers": cells, "parts": list(map(json.loads, parts)), "first": first}
    found = ""
    if frontier:
        picture = frontier_svg(as_rows(frontier), frontier[0].limit, "Fastest layout for each memory")
        found = f'<section><h2>Found by the search</h2><div class="scroll">{picture}</div></section>\n'
    still = "".join(f'<div class="scroll">{svg}</div>' for _, _, svg in own["pictures"])
    body = f"""{header("Plan", printable(name), printable(lead))}<main id="root">
<noscript><p>The sliders need this page's own script. Below is the recipe as it is.</p>{still}</noscript></main>
<main>{found}<section><h2>What the sliders show</h2><p>All {len(cells):,} combinations of these values were predicted
when this page was written. Nothing is interpolated. Data parallelism uses the devices that other axes leave.</p>
</section></main>"""
    return _written(f"{name}: plan", body, data, ("kit.js", "machine.js"), PLAN), len(cells)


def of_runs(
    runs: Sequence[ComparedRun],
    still: str,
    folder: Path | None = None,
    sweep: Mapping[str, Any] | None = None,
) -> str:
    """The part "Runs" with these runs side by side, or with what a sweep has found. still: the same as plain text.
    sweep: its `fivefold_plan/pages/sweep.view`, and the folder that it lies in."""
    points = max(FEWEST, POINTS // max(1, len(runs)))
    rows = [{"name": printable(str(run.folder)), "label": run.name, **row(run)} for run in runs]
    first = {
        "names": [one["name"] for one in rows],
        "sweeps": ["sweep"] if sweep else [],
        "figures": {key: title for key, (title, _) in FIGURES.items()},
    }
    data = {
        "rows": [first, *rows],
        "compared": side_by_side(runs),
        "axes": {axis: drawn(runs, axis, points) for axis in AXES},
        "sweep": sweep,
        "place": first["sweeps"] or first["names"],
    }
    head = header("Comparison", f"{len(runs)} runs", ", ".join(run.name for run in runs))
    title = f"{len(runs)} runs compared"
    if sweep and folder:
        name = printable(folder.resolve().name)
        head, title = header("Sweep", name, sweep["lead"]), f"{name}: sweep"
    body = f'{head}<main id="root" class="runs"><noscript><pre>{escape(still)}</pre></noscript></main>'
    return _written(title, body, data, ("uPlot.iife.min.js", "kit.js", "curves.js", "runs.js"), RUNS)


def write_sweep(folder: Path, swept: Results) -> Path:
    """Writes FOLDER/report.html and returns its path."""
    guard(folder)
    runs = read_runs(finished(folder, swept))
    path = folder / "report.html"
    write_atomically(path, of_runs(runs, swept.text(), folder, view(folder, swept)))
    return path


def _written(title: str, body: str, data: Any, modules: Sequence[str], answering: str) -> str:
    """A page with recorded answers. modules: files of its script. answering: makes of the data what they ask."""
    text = json.dumps(data, separators=(",", ":")).encode()
    packed = base64.b64encode(gzip.compress(text, mtime=0)).decode()
    body += f"""
<p id="told" role="status"></p><script type="application/octet-stream" id="data">{packed}</script>"""

    def file(name: str) -> str:
        return (Path(__file__).parent / "page" / name).read_text("utf-8")

    wide = "main, header, footer { max-width: 80rem; } header { padding-top: 2rem; }"
    style = f"{asset('report.css')}\n{css()}\n{STYLE}\n{file('uPlot.min.css')}\n{file('play.css')}{wide}"
    script = re.sub(r"^import .*$|^export ", "", "\n".join(map(file, modules)), flags=re.MULTILINE)
    script = f"/* {file('uPlot.LICENSE')} */\n{script}" if "uPlot.iife.min.js" in modules else script
    return document(printable(title), body, style, f"{script}{answering}{OPEN}")
