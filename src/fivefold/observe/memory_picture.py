"""Draws memory over a step as text for terminals and as SVG for light and dark themes, and keeps those of a run in
RUN/traces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from fivefold.draw.canvas import Axes, Canvas, linear_scale
from fivefold.files import MOST_TRACE, read_json, understood
from fivefold.observe.format import size
from fivefold.observe.metrics import write_trace
from fivefold.schedules.timelines import AWAY, CATEGORIES, MemoryTimeline

LETTERS = {"params": "W", "gradients": "G", "optimizer": "S", "activations": "A", "buffers": "b"}
PHASE_LETTERS = {"forward": "F", "backward": "B", "update": "U", "other": "-"}
LEGEND = ", ".join(
    [f"{LETTERS[name]} {words}" for name, words in CATEGORIES.items()]
    + [f"{letter} {kind}" for kind, letter in PHASE_LETTERS.items()]
)
COLORS = {
    "params": "blue", "gradients": "green", "optimizer": "orange", "activations": "purple", "buffers": "grey"
}  # fmt: skip
"""Of the categories, in all pictures of memory."""
PHASE_COLORS = {"forward": "blue", "backward": "green", "update": "purple", "other": "grey"}
AWAY_COLORS = {"host": "line red", "disk": "line ink"}
WIDTH, LEFT, RIGHT, TOP, HIGH, BAND, GAP = 960, 84, 24, 62, 200, 14, 58  # pixels
Named = Sequence[tuple[str, MemoryTimeline]]


def summary(timeline: MemoryTimeline) -> str:
    """`peak 84.6 MiB in backward: weights 12.1 MiB, ...; beside it, host memory 96.0 MiB`."""
    parts = ", ".join(f"{CATEGORIES[name]} {size(held)}" for name, held in timeline.at_peak.items() if held)
    away = "".join(f"; beside it, {AWAY[name]} {size(max(sizes))}" for name, sizes in timeline.away.items())
    return f"peak {size(timeline.peak)} in {timeline.peak_phase}: {parts}{away}"


def to_text(timelines: Named, columns: int = 100, rows: int = 12) -> str:
    """Timelines under each other on one scale, in the letters of `LEGEND`."""
    most = max(timeline.peak for _, timeline in timelines) or 1
    lines = []
    for name, timeline in timelines:
        lines.append(f"{name}: {summary(timeline)}")
        totals, stacks = timeline.totals, []
        for column in range(columns):  # the letters from the bottom up, of the largest sum in the column
            first, last = (at * len(totals) // columns for at in (column, column + 1))
            largest = max(range(first, max(first + 1, last)), key=totals.__getitem__)
            stack, height = "", 0.0
            for category, sizes in timeline.bytes.items():
                height += sizes[largest] * rows / most
                stack += LETTERS[category] * (round(height) - len(stack))
            stacks.append(stack)
        for row in range(rows, 0, -1):
            label = size(most * row / rows) if row in (rows, rows // 2) else ""
            lines.append(f"{label:>9} │" + "".join(stack[row - 1 : row] or " " for stack in stacks).rstrip())
        phases = "".join(PHASE_LETTERS[timeline.phase_at((i + 0.5) / columns)] for i in range(columns))
        lines += [f"{'':9} └{phases}", ""]
    return "\n".join([*lines, LEGEND, ""])


def to_svg(timelines: Named, title: str = "") -> str:
    """Timelines under each other on one scale of bytes. What is offloaded is a line: it is not part of the sum."""
    most = max((max(t.peak, *map(max, t.away.values()), 0) for _, t in timelines), default=0) or 1
    unit = next(u for u in (2**40, 2**30, 2**20, 2**10, 1) if most >= u)
    scale = linear_scale(0.0, most / unit, zero=True)
    canvas, top = Canvas(title, LEFT, WIDTH), float(TOP)
    away = {name for _, timeline in timelines for name in timeline.away}
    shown = [(COLORS[name], words) for name, words in CATEGORIES.items()]
    canvas.legend(LEFT, 43, shown + [(AWAY_COLORS[name], AWAY[name]) for name in AWAY if name in away])
    for name, timeline in timelines:
        canvas.text(LEFT, top + 12, f"{name}: {summary(timeline)}")
        top += 22
        axes = Axes(LEFT, top, WIDTH - RIGHT, top + HIGH, linear_scale(0.0, 1.0, zero=True), scale)
        canvas.levels(axes, [size(tick * unit) for tick in scale.ticks])
        below = [0] * len(timeline.totals)
        for category, sizes in timeline.bytes.items():
            above = [a + b for a, b in zip(below, sizes, strict=True)]
            if any(sizes):
                outline = (*_steps(above, unit), *reversed(_steps(below, unit)))
                tip = f"{CATEGORIES[category]}: at most {size(max(sizes))}"
                canvas.line(f"area {COLORS[category]}", map(axes.at, outline), tip)
            below = above
        for place, sizes in timeline.away.items():
            canvas.line(AWAY_COLORS[place], map(axes.at, _steps(sizes, unit)), AWAY[place])
        peak = axes.y(timeline.peak / unit)
        canvas.line("line ink dashed", [(axes.left, peak), (axes.right, peak)])
        for phase in timeline.phases:
            x, end = (axes.x(at / timeline.length) for at in (phase.start, phase.end))
            color = PHASE_COLORS[phase.kind]
            canvas.box(color, x, axes.bottom + 3, max(0.2, end - x), BAND, phase.kind, phase.kind)
        in_seconds = timeline.unit == "s"
        length = f"{timeline.length:.3g} s" if in_seconds else f"{timeline.length:,.0f} {timeline.unit}"
        canvas.text(axes.right, axes.bottom + BAND + 17, length, "soft end")
        top += HIGH + BAND + GAP
    return canvas.svg()


def _steps(values: Sequence[float], unit: int) -> list[tuple[float, float]]:
    """Corners of the steps at these heights, in units; from 0 to 1 across."""
    points, at = [], 0
    for value, equal in groupby(values):
        end = at + len(list(equal))
        points += [(at / len(values), value / unit), (end / len(values), value / unit)]
        at = end
    return points


def write(run: Path, timeline: MemoryTimeline) -> Path:
    """Writes RUN/traces/memory-step-N-rank-R.json."""
    return write_trace(run, f"memory-step-{timeline.step:08d}-rank-{timeline.rank}", timeline.as_json())


def read(run: Path, rank: int = 0) -> list[tuple[str, MemoryTimeline]]:
    """The measured steps of a rank: the run's first one, and the last that was measured."""
    paths, timelines = sorted((run / "traces").glob(f"memory-step-*-rank-{rank}.json")), []
    for path in paths[:1] + paths[1:][-1:]:
        with understood(path):
            timeline = MemoryTimeline.from_json(read_json(path, MOST_TRACE))
        timelines.append((f"step {timeline.step:,}, rank {timeline.rank}", timeline))
    return timelines


def section(run: Path) -> str:
    """The picture for the report's page; "" if no step was measured."""
    timelines = read(run)
    return to_svg(timelines, "Bytes of the tensors of rank 0 over a step, measured") if timelines else ""
