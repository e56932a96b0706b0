"""What a sweep has found, as parts of a page: its law, isoFLOP curves, curves of other fields, what failed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.draw.canvas import Line, picture
from fivefold.errors import printable
from fivefold.observe.format import short_number
from fivefold.observe.report import sampled
from fivefold.recipe import sweep as sweep_table
from fivefold_plan.advice.budget import BESIROGLU, FLOPS, HOFFMANN
from fivefold_plan.advice.scaling import COUNTED, Curve, Results, iso_flops

PUBLISHED = {"Hoffmann et al. (arXiv 2203.15556)": HOFFMANN, "Besiroglu et al. (arXiv 2404.10102)": BESIROGLU}
NEAR = 4.0  # the line of the law goes on to its minimum, if that is no further than this factor
MOST_CURVES = 28  # runs whose losses are drawn at first: 7 colours, 4 dashes
Part = tuple[Any, ...]
"""("h2" or "p" or "alarm", text), ("list", texts), ("table", label, head, rows), ("picture", label, SVG)."""


def finished(folder: Path, swept: Results) -> list[Path]:
    """The folders of finished runs, as far as they are there."""
    done = [folder / row.name for row in swept.sweep.rows if row.status == sweep_table.FINISHED]
    return [run for run in done if run.is_dir()]


def view(folder: Path, swept: Results) -> dict[str, Any]:
    """{lead, parts, drawn: names of the runs whose losses are drawn at first, at most MOST_CURVES}."""
    rows, there = swept.sweep.rows, finished(folder, swept)
    left = [
        f"{row.name}: {row.status} {row.why}".strip() for row in rows if row.status != sweep_table.FINISHED
    ]
    done, varied = len(rows) - len(left), ", ".join(swept.sweep.varied)
    lead = f"{swept.sweep.recipe}: {done} of {len(rows)} runs are finished. They vary {varied or 'nothing'}."
    notes = [*swept.notes]
    if gone := done - len(there):  # the table was copied without its runs
        notes.append(f"The folders of {gone} finished runs are not here, so their curves are not.")
    parts: list[Part] = [*(("alarm", printable(note)) for note in notes), *_law(swept)]
    for key, group in groupby(swept.curves, key=lambda curve: curve.key):
        curves = list(group)  # a picture for each varied field, with what came out best
        parts += [
            ("h2", f"Loss by {key}"),
            ("picture", key, curve_picture(key, curves)),
            ("list", [*map(str, curves)]),
        ]
    parts += [("h2", "Not finished"), ("list", [*map(printable, left)])] if left else []
    drawn = [printable(str(run)) for run in sampled(there, MOST_CURVES)]
    return {"lead": printable(lead), "parts": parts, "drawn": drawn}


def _law(swept: Results) -> Iterator[Part]:
    """Pictures and table of the law, or why there is none; nothing if neither sizes nor lengths vary."""
    if not swept.sized:
        return
    fit = swept.fit
    yield "h2", "Scaling law" if fit else "Sizes and lengths"
    for label, made in (
        ("Equal FLOPs", iso_flop_picture(swept)),
        ("Sizes and lengths", length_picture(swept)),
    ):
        if made:
            yield "picture", label, made
    if fit is None:
        yield "p", f"No law: {swept.why}."
        return
    yield (
        "p",
        (
            f"{COUNTED}. Fitted to {len(swept.runs)} runs by the Huber loss of log L; they scatter by "
            f"{100 * fit.scatter:.2f}% around it."
        ),
    )
    names = ["L = E + A/N^alpha + B/D^beta", "E", "A", "B", "alpha", "beta", "a of N ~ C^a"]
    rows = [
        [title, *(f"{value:.4g}" for value in law.constants.values())]
        for title, law in {"this sweep": fit.law, **PUBLISHED}.items()
    ]
    rows.insert(1, ["90% interval", *(f"{low:.3g} to {high:.3g}" for low, high in fit.intervals.values())])
    yield "table", "Scaling law", names, rows
    if swept.held_out:
        yield "p", "Held out of the fit, and predicted by it:"
        yield "list", [*map(str, swept.held_out)]
    optima = []
    for best in swept.optima():
        interval = " to ".join(short_number(best[f"parameters_{end}"]) for end in ("low", "high"))
        N, D = (short_number(best[name]) for name in ("parameters", "tokens"))
        beyond = " (extrapolated)" * best["outside"]
        optima.append([f"{best['flops']:.2e}{beyond}", N, interval, D, f"{best['loss']:.3f}"])
    yield "p", "The best size for a budget of FLOPs:"
    yield "table", "Best sizes", ["FLOPs", "N", "90%", "D", "loss"], optima


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
