"""The page of a sweep: its law, isoFLOP curves, curves of other fields, and all of its runs."""

from __future__ import annotations

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
from fivefold.observe.format import asset, document, section, short_number
from fivefold.plan.advice.budget import BESIROGLU, FLOPS, HOFFMANN, Law
from fivefold.plan.advice.sweep_results import COUNTED, Curve, Results, iso_flops, notes
from fivefold.recipe import sweep as sweep_table

PUBLISHED = {"Hoffmann et al. (arXiv 2203.15556)": HOFFMANN, "Besiroglu et al. (arXiv 2404.10102)": BESIROGLU}
NEAR = 4.0  # the line of the law goes on to its minimum, if that is no further than this factor
MOST_CURVES = 28  # runs whose losses are drawn: 7 colours, 4 dashes


def write(folder: Path, found: Results) -> Path:
    """Writes FOLDER/report.html and returns its path."""
    guard(folder)
    path = folder / "report.html"
    write_atomically(path, page(folder, found))
    return path


def page(folder: Path, found: Results) -> str:
    """The page as HTML."""
    name = printable(folder.resolve().name)
    rows = found.sweep.rows
    done = [row for row in rows if row.status == sweep_table.FINISHED]
    there = [folder / row.name for row in done if (folder / row.name).is_dir()]
    runs = _colored(compare.read_runs(there)) if there else []
    varied = ", ".join(found.sweep.varied)
    said = "".join(f'<p class="alarm">{escape(note)}</p>' for note in notes(found))
    if gone := len(done) - len(there):  # the table was copied without its runs
        said += (
            f'<p class="alarm">The folders of {gone} finished runs are not here, so their curves are not.</p>'
        )
    lead = f"{found.sweep.recipe}: {len(done)} of {len(rows)} runs are finished. They vary {varied or 'nothing'}."
    sections = [
        section("Scaling law" if found.law else "Sizes and lengths", _law(found)),
        section("Other fields", _curves(found.curves)),
        section("Runs", compare.figures_table(runs) + _unfinished(found) if runs else _unfinished(found)),
        section("Curves", compare.curves(_spread(runs))),
        section("Differences", compare.difference_table(runs) if len(runs) > 1 else ""),
    ]
    body = f"""<header>
<p class="kicker">Sweep</p>
<h1>{escape(name)}</h1>
<p class="lead">{escape(printable(lead))}</p>
{said}
</header>
<main>
{"".join(sections)}</main>"""
    return document(f"{name}: sweep", body, compare.style(), asset("report.js"))


def _colored(runs: Sequence[ComparedRun]) -> Sequence[ComparedRun]:
    """The runs with a colour and dashes of its own for each that is drawn."""
    drawn = {run.folder: number for number, run in enumerate(_spread(runs))}
    return [replace(run, color=drawn.get(run.folder, -1)) for run in runs]


def _spread(runs: Sequence[ComparedRun]) -> Sequence[ComparedRun]:
    """At most MOST_CURVES of the runs, evenly."""
    return (
        runs if len(runs) <= MOST_CURVES else [runs[i * len(runs) // MOST_CURVES] for i in range(MOST_CURVES)]
    )


def _unfinished(found: Results) -> str:
    rows = [row for row in found.sweep.rows if row.status != sweep_table.FINISHED]
    listed = "".join(f"<li>{escape(printable(f'{r.name}: {r.status} {r.why}'.strip()))}</li>" for r in rows)
    return f"<p>Not finished:</p><ul>{listed}</ul>" if rows else ""


def _law(found: Results) -> str:
    """Pictures and table of the law, or why there is none; "" if neither sizes nor lengths vary."""
    if not found.sized:
        return ""
    pictures = iso_flop_picture(found) + length_picture(found)
    if found.law is None:
        return pictures + f'<p class="none">No law: {escape(found.why)}.</p>'
    rows = [
        (escape(title), [f"<td>{value:.4g}</td>" for value in law.constants.values()])
        for title, law in {"this sweep": found.law.law, **PUBLISHED}.items()
    ]
    spans = [f"<td>{low:.3g} to {high:.3g}</td>" for low, high in found.law.intervals.values()]
    rows.insert(1, ("90% interval", spans))
    names = ["E", "A", "B", "alpha", "beta", "a of N ~ C^a"]
    table = compare.table(["L = E + A/N^alpha + B/D^beta", *names], rows)
    held = "".join(f"<li>{escape(str(one))}</li>" for one in found.held_out)
    held = f"<p>Held out of the fit, and predicted by it:</p><ul>{held}</ul>" if held else ""
    counted = (
        f'<p class="aside">{escape(COUNTED)}. Fitted to {len(found.runs)} runs by the Huber loss of log L; '
    )
    counted += f"they scatter by {100 * found.law.scatter:.2f}% around it.</p>"
    return pictures + f"<p></p>{counted}{table}{held}{_optima(found)}"


def _optima(found: Results) -> str:
    rows = []
    for one in found.optima():
        interval = " to ".join(short_number(one[f"parameters_{end}"]) for end in ("low", "high"))
        cells = (short_number(one["parameters"]), interval, short_number(one["tokens"]), f"{one['loss']:.3f}")
        beyond = " (extrapolated)" * one["outside"]
        rows.append((f"{one['flops']:.2e}{beyond}", [f"<td>{cell}</td>" for cell in cells]))
    return "<p>The best size for a budget of FLOPs:</p>" + compare.table(
        ["FLOPs", "N", "90%", "D", "loss"], rows
    )


def iso_flop_picture(found: Results) -> str:
    """Loss over size for a few budgets: runs as points, the law as lines, its minimum with a ring."""
    lines, law = [], found.law.law if found.law else None
    for color, (flops, points) in enumerate(iso_flops(found)):
        name = f"{flops:.1e} FLOPs"
        lines.append(Line(name, points, color, dots=True, line=law is None))
        if law is not None:
            lines.append(_iso_line(law, flops, points, color))
    words = "Equal FLOPs: loss by size, " + ("runs (points) and the law (lines)" if law else "runs")
    return picture(words, lines, "parameters N", "loss", (True, False))


def _iso_line(law: Law, flops: float, points: Sequence[tuple[float, float]], color: int) -> Line:
    best = law.optimum(flops)
    inside = points[0][0] / NEAR <= best.parameters <= points[-1][0] * NEAR
    ends = [points[0][0], points[-1][0], *([best.parameters] if inside else [])]
    sizes = np.geomspace(min(ends) / 1.1, max(ends) * 1.1, 40)
    drawn = [(float(N), law.loss(float(N), flops / (FLOPS * float(N)))) for N in sizes]
    marks = [(best.parameters, law.loss(best.parameters, best.tokens))] if inside else []
    return Line("", drawn, color, marks=marks)


def length_picture(found: Results) -> str:
    """Loss over tokens for each size: runs as points, the law as lines; held-out runs with a ring."""
    law, figures = found.law.law if found.law else None, {row.name: row.figures for row in found.sweep.rows}
    points: dict[float, list[tuple[float, float]]] = {}
    rings: dict[float, list[tuple[float, float]]] = {}
    for run in found.runs:
        points.setdefault(run.parameters, []).append((run.tokens, run.loss))
    for one in found.held_out:
        N, point = figures[one.name]["parameters"], (figures[one.name]["tokens"], one.measured)
        points.setdefault(N, []).append(point)
        rings.setdefault(N, []).append(point)
    lines = []
    for color, N in enumerate(sorted(points)):
        own = sorted(points[N])
        name = f"N {short_number(N)}"
        lines.append(Line(name, own, color, dots=True, line=law is None, marks=rings.get(N, ())))
        if law is not None:
            lengths = np.geomspace(own[0][0], own[-1][0], 30)
            lines.append(Line("", [(float(D), law.loss(N, float(D))) for D in lengths], color))
    words = "Loss by tokens and size" + (": runs (points) and the law (lines)" if law else "")
    return picture(words + "; rings: held out" * bool(rings), lines, "tokens D", "loss", (True, True))


def _curves(curves: Sequence[Curve]) -> str:
    """A picture for each varied field, with what came out best."""
    shown = ""
    for key, group in groupby(curves, key=lambda curve: curve.key):
        own = list(group)
        listed = "".join(f"<li>{escape(str(curve))}</li>" for curve in own)
        shown += f"{curve_picture(key, own)}<ul>{listed}</ul>"
    return shown


def curve_picture(key: str, curves: Sequence[Curve]) -> str:
    """Loss over the values of a field, a line for each setting of the others; the best value with a ring."""
    values = [x for curve in curves for x, _ in curve.points]
    log = min(values) > 0 and max(values) > 3 * min(values)
    lines = [
        Line(curve.label or key, curve.points, number, dots=True, marks=[curve.best])
        for number, curve in enumerate(curves)
    ]
    return picture(f"Loss by {key}; rings: the best of each line", lines, key, "loss", (log, False))
