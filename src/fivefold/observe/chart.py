"""Line charts as HTML, which work without a script, at any width, in light and dark mode.

The picture is an SVG that stretches with its box while strokes keep their width. Tick labels are HTML, so that they
stay readable on a phone. If a linear and a logarithmic scale both make sense, both are drawn and the style sheet shows
one. A script adds only the numbers under the cursor (page/report.js). A plotting library would add 4.5 MB to every
page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from fivefold.draw.canvas import Scale, linear_scale, log_scale, tick_labels, ticks
from fivefold.observe.format import short_number

# The x axis is divided into this many stretches. A line keeps at most four points of each (first, lowest, highest,
# last). It looks the same as with all points, with its spikes (M4, VLDB 2014, doi 10.14778/2732951.2732953).
STRETCHES = 500
MOST_BAD = 400  # marks of steps whose value was not finite


Span = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line: `values[i]` at ascending `steps[i]`. NaN leaves a gap. `style`: classes of the style sheet."""

    name: str
    steps: Sequence[float]
    values: Sequence[float]
    style: str = "first"
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """The content of a chart.

    id: unique in the page; unit: follows the numbers; zero: the linear axis starts at 0; log: offer the
    logarithmic scale; span: first and last step of the x axis; right: (factor, unit) of a second axis, whose
    numbers are the left ones times `factor`; bad: steps to mark, where the value was not finite; wide: over
    both columns of the page, with a legend.
    """

    id: str
    title: str
    series: Sequence[Series]
    span: Span
    unit: str = ""
    zero: bool = False
    log: bool = False
    right: tuple[float, str] | None = None
    bad: Sequence[int] = ()
    wide: bool = False
    note: str = ""


def draw(chart: Chart) -> str:
    """The chart as a <figure>; '' if no series has a finite value."""
    drawn = [thin(series, chart.span) for series in chart.series]
    drawn = [series for series in drawn if any(map(math.isfinite, series.values))]
    if not drawn:
        return ""
    values = [value for series in drawn for value in series.values if math.isfinite(value)]
    log = chart.log and min(values) > 0 and max(values) > min(values)
    scales = [_scale(chart, drawn, linear_scale(min(values), max(values), chart.zero), "linear")]
    if log:
        scales.append(_scale(chart, drawn, log_scale(min(values), max(values)), "log"))
    marks = [step for step in ticks(*chart.span, count=6) if step == int(step)]
    x_axis = "".join(
        f'<span style="left:{_across(step, chart) / 10:.2f}%">{short_number(step)}</span>' for step in marks
    )
    classes = "chart" + " wide" * chart.wide + " two-axes" * (chart.right is not None)
    keys = "".join(f'<li class="{s.style}">{escape(s.name)}</li>' for s in drawn)
    legend = f'<ul class="legend">{keys}</ul>' if chart.wide and len(drawn) > 1 else ""
    toggle = ""  # linear or logarithmic, which the style sheet reads
    if log:
        options = "".join(
            f'<label><input type="radio" name="{chart.id}-scale" class="{name}"{checked}><span>{name}</span></label>'
            for name, checked in (("linear", " checked"), ("log", ""))
        )
        toggle = f'<fieldset class="toggle"><legend>{escape(chart.title)}: scale</legend>{options}</fieldset>'
    words = escape(describe(chart, drawn))
    return f"""<figure class="{classes}" aria-labelledby="{chart.id}">
<figcaption><h3 id="{chart.id}">{escape(chart.title)}</h3>{legend}{toggle}</figcaption>
<div class="plot" tabindex="0" role="img" aria-label="{words}" data-chart="{_data(chart, drawn)}">
{"".join(scales)}<div class="cursor" hidden></div><output class="values" hidden></output></div>
<div class="x-axis" aria-hidden="true">{x_axis}<b>step</b></div>
{f'<p class="note">{escape(chart.note)}</p>' if chart.note else ""}</figure>
"""


def describe(chart: Chart, drawn: Sequence[Series]) -> str:
    """The chart in words, for screen readers: start, end and extremes of each line."""
    parts = []
    for series in drawn:
        points = [(s, v) for s, v in zip(series.steps, series.values, strict=True) if math.isfinite(v)]
        low, high = min(v for _, v in points), max(v for _, v in points)
        (s0, v0), (s1, v1) = points[0], points[-1]
        parts.append(
            f"{series.name}: {_show(v0, chart.unit)} at step {s0:,}, {_show(v1, chart.unit)} at step {s1:,}, "
            f"lowest {_show(low, chart.unit)}, highest {_show(high, chart.unit)}"
        )
    return f"{chart.title} by step. " + "; ".join(parts) + "."


def thin(series: Series, span: Span) -> Series:
    """`series` thinned to at most four points per stretch of the x axis, and one NaN if the stretch had any."""
    steps, values = np.asarray(series.steps, float), np.asarray(series.values, float)
    values = np.where(np.isfinite(values), values, np.nan)
    if len(steps) > 4 * STRETCHES:
        width = max(1, span[1] - span[0] + 1) / STRETCHES
        edges = np.searchsorted(steps, span[0] + width * np.arange(1, STRETCHES))
        keep: set[int] = set()
        for part in np.split(np.arange(len(steps)), edges):
            found = part[~np.isnan(values[part])]
            if len(found):
                kept = values[found]
                keep |= {int(found[i]) for i in (0, -1, kept.argmin(), kept.argmax())}
            keep |= {int(i) for i in part[np.isnan(values[part])][:1]}
        chosen = np.array(sorted(keep), dtype=int)
        steps, values = steps[chosen], values[chosen]
    return Series(series.name, [int(s) for s in steps], values.tolist(), series.style, series.dots)


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Moving mean of the finite values in a window around each value. Values that are not finite give NaN.

    Near the start the window shrinks on both sides (to a tenth) and stays centred, so a falling curve keeps its start.
    At the end it shrinks on the right only, so the last step's noise makes no tick.
    """
    array = np.asarray(values, float)
    finite, index = np.isfinite(array), np.arange(len(array))
    reach = np.maximum(np.minimum(index, window // 2), window // 20)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, array, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    low, high = np.maximum(index - reach, 0), np.minimum(index + reach + 1, len(array))
    with np.errstate(invalid="ignore"):
        return np.where(finite, (sums[high] - sums[low]) / (counts[high] - counts[low]), np.nan).tolist()


def _scale(chart: Chart, drawn: Sequence[Series], scale: Scale, name: str) -> str:
    """Grid, labels and lines of one vertical scale, with x and y in thousandths of the box."""
    grid = "".join(f"M0 {1000 - 1000 * scale.height(tick):.1f}h1000" for tick in scale.ticks)
    labels = _labels("left", scale.ticks, scale, 1.0, chart.unit)
    if chart.right:  # round numbers of its own, beside the grid lines
        factor, unit = chart.right
        own = linear_scale(scale.low * factor, scale.high * factor, chart.zero).ticks
        inside = [tick for tick in own if tick <= scale.high * factor * 1.001]
        labels += _labels("right", inside, scale, factor, unit)
    spread = chart.bad[:: max(1, math.ceil(len(chart.bad) / MOST_BAD))]
    bad = "".join(f"M{_across(step, chart):.1f} 1000v-1000" for step in spread)
    lines = "".join(_line(series, chart, scale) for series in drawn)
    return (
        f'<div class="scale {name}" aria-hidden="true">{labels}<svg viewBox="0 0 1000 1000" '
        f'preserveAspectRatio="none"><path class="grid" d="{grid}"/>'
        + (f'<path class="bad" d="{bad}"/>' if bad else "")
        + f"{lines}</svg></div>\n"
    )


def _labels(side: str, values: Sequence[float], scale: Scale, factor: float, unit: str) -> str:
    """Labels of `values` at the heights of `values` / factor."""
    return "".join(
        f'<span class="{side}" style="top:{100 - 100 * scale.height(value / factor):.2f}%">{text}</span>'
        for value, text in zip(values, tick_labels(values, unit), strict=True)
    )


def _line(series: Series, chart: Chart, scale: Scale) -> str:
    """The path of one series. A single point becomes a dot (a line of length 0 with round ends)."""
    path, dots, pen = [], [], False
    for index, (step, value) in enumerate(zip(series.steps, series.values, strict=True)):
        if not math.isfinite(value) or (scale.log and value <= 0):
            pen = False
            continue
        point = f"{_across(step, chart):.1f} {1000 - 1000 * scale.height(value):.1f}"
        following = series.values[index + 1] if index + 1 < len(series.values) else math.nan
        if series.dots or not (pen or math.isfinite(following)):
            dots.append(f"M{point}h0")
        path.append(("L" if pen else "M") + point)
        pen = True
    style = escape(series.style)
    marks = f'<path class="dots {style}" d="{"".join(dots)}"/>' if dots else ""
    return f'<path class="line {style}" d="{"".join(path)}"/>{marks}'


def _data(chart: Chart, drawn: Sequence[Series]) -> str:
    """The data with which the script shows numbers under the cursor, as an attribute's text."""

    def digits(value: float) -> float | int | None:
        if not math.isfinite(value):
            return None
        short = float(f"{value:.5g}")
        return int(short) if short.is_integer() and abs(short) < 2**53 else short

    lines = [{"name": s.name, "x": s.steps, "y": list(map(digits, s.values))} for s in drawn]
    data = {"span": _wide(chart.span), "unit": chart.unit, "right": chart.right, "lines": lines}
    return escape(json.dumps(data, separators=(",", ":"), allow_nan=False))


def _show(value: float, unit: str) -> str:
    number = f"{value:,.4g}" if abs(value) < 1e4 else short_number(value)
    return f"{number}{unit if unit == '%' else ' ' + unit}".strip()


def _wide(span: Span) -> Span:
    """The ends of the x axis. A run of one step is in the middle."""
    return (float(span[0]), float(span[1])) if span[1] > span[0] else (span[0] - 1.0, span[0] + 1.0)


def _across(step: float, chart: Chart) -> float:
    low, high = _wide(chart.span)
    return 1000 * (step - low) / (high - low)
