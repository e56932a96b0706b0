"""Pictures of losses that benchmarks measured, for `make_pictures.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from fivefold.observe import palette
from fivefold.observe.scale import linear_scale, tick_labels

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
STYLE = (
    ".losses { color-scheme: light dark; --paper: #fdfcf8; --ink: #333; --rule: #ddd8cc; "
    + " ".join(f"--c{i}: {color};" for i, color in enumerate(palette.LIGHT))
    + " }\n@media (prefers-color-scheme: dark) { .losses { --paper: #171614; --ink: #e9e6df; --rule: #45423b; "
    + " ".join(f"--c{i}: {color};" for i, color in enumerate(palette.DARK))
    + " } }\n.paper { fill: var(--paper); } text { fill: var(--ink); } .grid { stroke: var(--rule); }\n"
)
DASHES = ("", "6 3", "2 3")
Curve = Sequence[tuple[float, float]]
WIDE, LEFT, TOP, BOTTOM, LEGEND = 760, 60, 44, 50, 190


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
    title = "quickstart: training loss by precision mode, mean of the seeds"
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
    title = f"quickstart, {steps} steps: validation loss by optimizer"
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
    height = 380
    names = list(next(iter(panels.values())))
    parts = [text(20, 24, title, "600"), text(WIDE - LEGEND + 14, TOP + 2, legend)]
    for number, name in enumerate(names):
        spot = TOP + 10 + 18 * number
        color, dash = style(number)
        parts.append(
            f'<path d="M{WIDE - LEGEND + 14} {spot + 6}h16" style="stroke: {color}" stroke-width="2.4"{dash}/>'
        )
        parts.append(text(WIDE - LEGEND + 36, spot + 11, name))
    for number, (label, curves) in enumerate(panels.items()):
        parts += panel(
            label, {names.index(name): curve for name, curve in curves.items()}, number * height, height, skip
        )
    size = f'width="{WIDE}" height="{height * len(panels)}" viewBox="0 0 {WIDE} {height * len(panels)}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="losses" {size}><style>{STYLE}</style>'
        f'<rect width="100%" height="100%" class="paper"/>{"".join(parts)}</svg>\n'
    )


def panel(label: str, curves: Mapping[int, Curve], down: int, height: int, skip: float) -> list[str]:
    """Curves by their numbers in the legend."""
    end = max(curve[-1][0] for curve in curves.values())
    low = min(loss for curve in curves.values() for _, loss in curve)
    high = max(loss for curve in curves.values() for at, loss in curve if at > skip * end)
    up, across = linear_scale(low, high, zero=False), linear_scale(0, end, zero=True)
    room, bottom = WIDE - LEGEND - LEFT, down + height - BOTTOM

    def x(at: float) -> float:
        return LEFT + room * at / end

    def y(loss: float) -> float:
        return bottom - (height - TOP - BOTTOM) * min(1.0, up.height(loss))

    parts = [text(LEFT, down + height - 10, label)]
    for tick, words in zip(up.ticks, tick_labels(up.ticks), strict=True):
        parts.append(f'<path d="M{LEFT} {y(tick):.1f}h{room}" class="grid"/>{text(20, y(tick) + 4, words)}')
    for tick, words in zip(across.ticks, tick_labels(across.ticks), strict=True):
        if tick <= end:
            parts.append(text(x(tick) - 8, bottom + 20, words))
    for number, curve in curves.items():
        begin = next((i for i, (_, loss) in enumerate(curve) if loss <= up.ticks[-1]), len(curve) - 1)
        line = "L".join(f"{x(at):.1f} {y(loss):.1f}" for at, loss in curve[begin:])
        color, dash = style(number)
        parts.append(f'<path d="M{line}" fill="none" style="stroke: {color}" stroke-width="1.6"{dash}/>')
    return parts


def style(number: int) -> tuple[str, str]:
    """Colour and dashes of a curve."""
    dash = DASHES[number // len(palette.LIGHT) % len(DASHES)]
    return f"var(--c{number % len(palette.LIGHT)})", f' stroke-dasharray="{dash}"' if dash else ""


def text(x: float, y: float, words: str, weight: str = "400") -> str:
    style = f'font-family="sans-serif" font-size="13" font-weight="{weight}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{words}</text>'
