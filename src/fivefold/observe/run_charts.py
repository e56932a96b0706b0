"""The charts of a run's page and their metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from fivefold.observe.chart import Chart, Series, draw, smooth
from fivefold.observe.sources import SETS, validation_chart
from fivefold.observe.summary import column, finite

Lines = Sequence[dict[str, Any]]
StepRange = tuple[int, int]


def run_charts(lines: Lines) -> str:
    """All charts of a run as HTML, most important first. A last line names those without data."""
    steps = [line["step"] for line in lines]
    span = (min(steps), max(steps))
    memory_steps, memory = column(lines, "peak_memory_bytes")
    gib = Series("peak memory", memory_steps, [value / 2**30 for value in memory])
    bits = Series("bits per byte", *column(lines, "val_bits_per_byte"), style="second", dots=True)
    rate = Series("learning rate", *column(lines, "lr"))
    norm = _with_mean("gradient norm", *column(lines, "grad_norm"))
    charts = [
        loss_chart(lines, span),
        validation_chart(lines, span),
        Chart("bits", "Bits per byte, validation", [bits], span, log=True),
        Chart("lr", "Learning rate", [rate], span, zero=True),
        Chart("norm", "Gradient norm", norm, span, zero=True, log=True),
        throughput_chart(lines, span),
        wait_chart(lines, span),
        Chart("memory", "Peak memory, GiB", [gib], span, zero=True, unit="GiB"),
    ]
    drawn = [(chart, draw(chart)) for chart in charts]
    missing = [chart.title.lower() for chart, html in drawn if not html and chart.id != SETS]
    none = f'<p class="none">Not in this run\'s metrics: {"; ".join(missing)}.</p>' if missing else ""
    return f'<div class="charts">\n{"".join(html for _, html in drawn)}</div>\n{none}'


def loss_chart(lines: Lines, span: StepRange) -> Chart:
    """Train loss per step (faint) under its moving mean, and validation loss as points."""
    steps, losses = column(lines, "loss")
    bad = [step for step, loss in zip(steps, losses, strict=True) if not math.isfinite(loss)]
    validation = Series("validation", *column(lines, "val_loss"), style="second", dots=True)
    note = "Red: steps whose loss was NaN or infinite." if bad else ""
    series = [*_with_mean("train", steps, losses), validation]
    return Chart("loss", "Loss", series, span, log=True, bad=bad, wide=True, note=note)


def throughput_chart(lines: Lines, span: StepRange) -> Chart:
    """Tokens per second, with MFU on the right axis, which is proportional to them."""
    pairs = [(line.get("mfu"), line.get("tokens_per_s")) for line in lines]
    ratios = finite([mfu / speed for mfu, speed in pairs if mfu and speed])
    title = "Tokens per second" + (" and MFU" if ratios else "")
    right = (100 * median(ratios), "%") if ratios else None
    series = _with_mean("tokens/s", *column(lines, "tokens_per_s"))
    return Chart("speed", title, series, span, zero=True, right=right)


def wait_chart(lines: Lines, span: StepRange) -> Chart:
    """Share of each step's time spent waiting for its batch."""
    found = [line for line in lines if line.get("step_s") and line.get("data_wait_s") is not None]
    shares = [100 * line["data_wait_s"] / line["step_s"] for line in found]
    series = _with_mean("waiting", [line["step"] for line in found], shares)
    return Chart("wait", "Waiting for data, share of a step", series, span, unit="%", zero=True)


def _with_mean(name: str, steps: Sequence[int], values: Sequence[float]) -> list[Series]:
    """A noisy line (faint) and its moving mean over 1/50 of the run. A short run has the line alone."""
    window = len(steps) // 50 | 1
    if window == 1:
        return [Series(name, steps, values)]
    mean = Series(f"{name}, mean of {window} steps", steps, smooth(values, window))
    return [Series(name, steps, values, "faint"), mean]
