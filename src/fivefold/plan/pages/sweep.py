"""The page of a sweep: its law, isoFLOP curves, curves of other fields, and all of its runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from itertools import groupby
from pathlib import Path

import numpy as np

from fivefold.draw.canvas import Line, picture
from fivefold.errors import printable
from fivefold.files import guard, write_atomically
from fivefold.observe import compare
from fivefold.observe.compare import ComparedRun
from fivefold.observe.format import asset, document, header, section, short_number
from fivefold.plan.advice.budget import BESIROGLU, FLOPS, HOFFMANN
from fivefold.plan.advice.scaling import COUNTED, Curve, Results, iso_flops
from fivefold.recipe import sweep as sweep_table

PUBLISHED = {"Hoffmann et al. (arXiv 2203.15556)": HOFFMANN, "Besiroglu et al. (arXiv 2404.10102)": BESIROGLU}
NEAR = 4.0  # the line of the law goes on to its minimum, if that is no further than this factor
MOST_CURVES = 28  # runs whose losses are drawn: 7 colours, 4 dashes


def write(folder: Path, swept: Results) -> Path:
    """Writes FOLDER/report.html and returns its path."""
    guard(folder)
    path = folder / "report.html"
    write_atomically(path, page(folder, swept))
    return path


def page(folder: Path, swept: Results) -> str:
    """The page as HTML."""
    name = printable(folder.resolve().name)
    rows = swept.sweep.rows
    done = [row for row in rows if row.status == sweep_table.FINISHED]
    there = [folder / row.name for row in done if (folder / row.name).is_dir()]
    runs = _colored(compare.read_runs(there)) if there else []
    notes = [*swept.notes]
    if gone := len(done) - len(there):  # the table was copied without its runs
        notes.append(f"The folders of {gone} finished runs are not here, so their curves are not.")
    alarms = "".join(f'<p class="alarm">{escape(note)}</p>' for note in notes)
    varied = ", ".join(swept.sweep.varied)
    lead = f"{swept.sweep.recipe}: {len(done)} of {len(rows)} runs are finished. They vary {varied or 'nothing'}."
    unfinished = "".join(
        f"<li>{escape(printable(f'{row.name}: {row.status} {row.why}'.strip()))}</li>"
        for row in rows
        if row.status != sweep_table.FINISHED
    )
    unfinished = f"<p>Not finished:</p><ul>{unfinished}</ul>" if unfinished else ""
    others = ""  # a picture for each varied field, with what came out best
    for key, group in groupby(swept.curves, key=lambda curve: curve.key):
        curves = list(group)
        listed = "".join(f"<li>{escape(str(curve))}</li>" for curve in curves)
        others += f"{curve_picture(key, curves)}<ul>{listed}</ul>"
    sections = [
        section("Scaling law" if swept.fit else "Sizes and lengths", _law(swept)),
        section("Other fields", others),
        section("Runs", (compare.figures_table(runs) if runs else "") + unfinished),
        section("Curves", compare.curves(_spread(runs))),
        section("Differences", compare.difference_table(runs) if len(runs) > 1 else ""),
    ]
    body = header("Sweep", name, printable(lead), alarms) + f"<main>\n{''.join(sections)}</main>"
    return document(f"{name}: sweep", body, compare.style(), asset("report.js"))


def _colored(runs: Sequence[ComparedRun]) -> Sequence[ComparedRun]:
    """The runs with a colour and dashes of its own for each that is drawn."""
    drawn = {run.folder: number for number, run in enumerate(_spread(runs))}
    return [replace(run, color=drawn.get(run.folder, -1)) for run in runs]


def _spread(runs: Sequence[ComparedRun]) -> Sequence[ComparedRun]:
    """At most MOST_CURVES of the runs, evenly."""
    count = min(len(runs), MOST_CURVES)
    return [runs[i * len(runs) // count] for i in range(count)]


def _law(swept: Results) -> str:
    """Pictures and table of the law, or why there is none; "" if neither sizes nor lengths vary."""
    if not swept.sized:
        return ""
    pictures, fit = iso_flop_picture(swept) + length_picture(swept), swept.fit
    if fit is None:
        return pictures + f'<p class="none">No law: {escape(swept.why)}.</p>'
    rows = [
        (escape(title), [f"<td>{value:.4g}</td>" for value in law.constants.values()])
        for title, law in {"this sweep": fit.law, **PUBLISHED}.items()
    ]
    spans = [f"<td>{low:.3g} to {high:.3g}</td>" for low, high in fit.intervals.values()]
    rows.insert(1, ("90% interval", spans))
    names = ["E", "A", "B", "alpha", "beta", "a of N ~ C^a"]
    table = compare.table(["L = E + A/N^alpha + B/D^beta", *names], rows)
    held = "".join(f"<li>{escape(str(run))}</li>" for run in swept.held_out)
    held = f"<p>Held out of the fit, and predicted by it:</p><ul>{held}</ul>" if held else ""
    optima = []
    for best in swept.optima():
        interval = " to ".join(short_number(best[f"parameters_{end}"]) for end in ("low", "high"))
        N, D = (short_number(best[name]) for name in ("parameters", "tokens"))
        cells = N, interval, D, f"{best['loss']:.3f}"
        beyond = " (extrapolated)" * best["outside"]
        optima.append((f"{best['flops']:.2e}{beyond}", [f"<td>{cell}</td>" for cell in cells]))
    return (
        f'{pictures}<p></p><p class="aside">{escape(COUNTED)}. Fitted to {len(swept.runs)} runs by the Huber loss of '
        f"log L; they scatter by {100 * fit.scatter:.2f}% around it.</p>{table}{held}"
        "<p>The best size for a budget of FLOPs:</p>"
    ) + compare.table(["FLOPs", "N", "90%", "D", "loss"], optima)


def iso_flop_picture(swept: Results) -> str:
    """Loss over size for a few budgets: runs as points, the law as lines, its minimum with a ring."""
    lines, law = [], swept.fit and swept.fit.law
    for color, (flops, points) in enumerate(iso_flops(swept)):
        lines.append(Line(f"{flops:.1e} FLOPs", points, color, dots=True, line=law is None))
        if law is None:
            continue
        best, ends, marks = law.optimum(flops), [points[0][0], points[-1][0]], []
        if ends[0] / NEAR <= best.parameters <= ends[1] * NEAR:
            ends.append(best.parameters)
            marks = [(best.parameters, law.loss(best.parameters, best.tokens))]
        sizes = np.geomspace(min(ends) / 1.1, max(ends) * 1.1, 40).tolist()
        lines.append(Line("", [(N, law.loss(N, flops / (FLOPS * N))) for N in sizes], color, marks=marks))
    title = "Equal FLOPs: loss by size, measured" + " (points) and by the law (lines)" * bool(law)
    return picture(title, lines, "parameters N", "loss", (True, False))


def length_picture(swept: Results) -> str:
    """Loss over tokens for each size: runs as points, the law as lines; held-out runs with a ring."""
    law, figures = swept.fit and swept.fit.law, {row.name: row.figures for row in swept.sweep.rows}
    points: dict[float, list[tuple[float, float]]] = defaultdict(list)
    rings: dict[float, list[tuple[float, float]]] = defaultdict(list)
    for run in swept.runs:
        points[run.parameters].append((run.tokens, run.loss))
    for held in swept.held_out:
        N, point = figures[held.name]["parameters"], (figures[held.name]["tokens"], held.measured)
        points[N].append(point)
        rings[N].append(point)
    lines = []
    for color, (N, runs) in enumerate(sorted(points.items())):
        runs.sort()
        name = f"N {short_number(N)}"
        lines.append(Line(name, runs, color, dots=True, line=law is None, marks=rings[N]))
        if law is not None:
            lengths = np.geomspace(runs[0][0], runs[-1][0], 30).tolist()
            lines.append(Line("", [(D, law.loss(N, D)) for D in lengths], color))
    title = "Loss by tokens and size, measured" + " (points) and by the law (lines)" * bool(law)
    title += "; rings: held out" * bool(swept.held_out)
    return picture(title, lines, "tokens D", "loss", (True, True))


def curve_picture(key: str, curves: Sequence[Curve]) -> str:
    """Loss over the values of a field, a line for each setting of the others; the best value with a ring."""
    values = [x for curve in curves for x, _ in curve.points]
    log = min(values) > 0 and max(values) > 3 * min(values)
    lines = [
        Line(curve.label or key, curve.points, number, dots=True, marks=[curve.best])
        for number, curve in enumerate(curves)
    ]
    return picture(f"Loss by {key}, measured; rings: the best of each line", lines, key, "loss", (log, False))
