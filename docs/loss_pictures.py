"""Pictures of losses that benchmarks measured, for `make_pictures.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from fivefold.draw.canvas import Axes, Canvas, Line, Scale, draw_line, linear_scale
from fivefold.draw.canvas import legend as draw_legend

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
Curve = Sequence[tuple[float, float]]
WIDE, HIGH, LEFT, TOP, BOTTOM, LEGEND = 760, 380, 60, 44, 50, 190  # pixels: of a panel, margins


def precision() -> str:
    """Training loss in each precision mode, the mean of its seeds (benchmarks/precision.py)."""
    found = json.loads((RESULTS / "precision.json").read_text())
    curves: dict[str, Curve] = {}
    for mode, row in found["modes"].items():
        each = [found["runs"][f"{mode} seed {seed}"]["curve"] for seed in row["seeds"]]
        means = [fmean(losses) for losses in zip(*each, strict=True)]
        curves[f"{mode}: {row['val_loss']:.4f}"] = [
            ((place + 1) * found["every"], loss) for place, loss in enumerate(means)
        ]
    title = "quickstart: training loss by precision mode, measured, mean of the seeds"
    return picture(title, "validation loss at the end", {"step": curves})


def optimizers(steps: int = 600) -> str:
    """Validation loss with each optimizer against tokens and against seconds (benchmarks/optimizers.py): at the rate
    that was best with seed 0, the median of the seeds."""
    found = json.loads((RESULTS / "optimizers.json").read_text())
    runs = [run for run in found["runs"] if run["steps"] == steps]
    tokens: dict[str, Curve] = {}
    seconds: dict[str, Curve] = {}
    for name in dict.fromkeys(run["optimizer"] for run in sorted(runs, key=lambda run: run["final"])):
        best = best_of([run for run in runs if run["optimizer"] == name])
        rows = [(at, count, median(losses)) for at, count, losses in together(best)]
        label = f"{name}: {rows[-1][2]:.3f}"
        tokens[label] = [(count / 1e6, loss) for _, count, loss in rows]
        if (each := found["step_s"].get(name)) is not None:
            seconds[label] = [(at * each, loss) for at, _, loss in rows]
    title = f"quickstart, {steps} steps: validation loss by optimizer, measured"
    return picture(title, "loss at the end", {"tokens (M)": tokens, "seconds": seconds}, skip=0.15)


def best_of(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs at the rate that is best with seed 0."""
    lr = min((run for run in runs if run["seed"] == 0), key=lambda run: run["final"])["lr"]
    return [run for run in runs if run["lr"] == lr]


def together(runs: Sequence[dict[str, Any]]) -> list[tuple[int, int, list[float]]]:
    """(step, tokens, losses of all runs) of each validation."""
    points = zip(*(run["losses"] for run in runs), strict=True)
    return [(each[0][0], each[0][1], [loss for _, _, loss in each]) for each in points]


def picture(title: str, legend: str, panels: Mapping[str, Mapping[str, Curve]], skip: float = 0.0) -> str:
    """A panel under the other, by what goes across. skip: the share of each curve, at its beginning, that may be higher
    than the panel."""
    canvas = Canvas(title, width=WIDE)
    names = list(next(iter(panels.values())))
    lines = {name: Line(name, (), number) for number, name in enumerate(names)}
    canvas.text(WIDE - LEGEND + 14, TOP + 2, legend)
    draw_legend(canvas, WIDE - LEGEND + 14, TOP + 22, list(lines.values()))
    for number, (label, curves) in enumerate(panels.items()):
        panel(canvas, label, {lines[name]: curve for name, curve in curves.items()}, number * HIGH, skip)
    return canvas.svg()


def panel(canvas: Canvas, label: str, curves: Mapping[Line, Curve], down: int, skip: float) -> None:
    """Curves in the styles of their lines."""
    end = max(curve[-1][0] for curve in curves.values())
    low = min(loss for curve in curves.values() for _, loss in curve)
    high = max(loss for curve in curves.values() for at, loss in curve if at > skip * end)
    up, rounded = linear_scale(low, high, zero=False), linear_scale(0, end, zero=True)
    across = Scale(0, end, [tick for tick in rounded.ticks if tick <= end])
    axes = Axes(LEFT, down + TOP, WIDE - LEGEND, down + HIGH - BOTTOM, across, up)
    canvas.axes(axes, label, "")
    for line, curve in curves.items():
        begin = next((i for i, (_, loss) in enumerate(curve) if loss <= up.ticks[-1]), len(curve) - 1)
        points = [(at, min(loss, up.high)) for at, loss in curve[begin:]]
        draw_line(canvas, axes, line, points)
