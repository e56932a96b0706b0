"""Draws the lessons: criteria of layouts as bars, when messages hide as curves, terms of a plan as bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from fivefold.draw.canvas import NAMES, Axes, Canvas, log_scale, text_width
from fivefold.lessons.overlap import count_text
from fivefold.lessons.terms import decimal
from fivefold.observe.format import memory_text, size
from fivefold.observe.memory_picture import COLORS

if TYPE_CHECKING:
    from fivefold.lessons.compare import Row
    from fivefold.lessons.overlap import Rule

WIDTH, LEFT, TOP, ROW = 860, 96, 108, 26  # pixels
PANEL, BAR = 255, 160  # a criterion, its longest bar
REASONS = {"operations": "activations", "recompute": "recompute", "sums": "sums", "update": "updates"}
AXES = ("dp", "tp", "cp", "pp", "ep")


class Panel(NamedTuple):
    """A criterion. kinds: words and colour of each part. here: what was measured, 0 if nothing was."""

    name: str
    kinds: Mapping[str, tuple[str, str]]
    values: Callable[[Row], Mapping[str, float]]
    words: Callable[[float], str]
    here: Callable[[Row], float]


def criteria(rows: Sequence[Row], title: str) -> str:
    """A line per layout: its redundant computing, memory and bytes sent as bars, what was measured as a ring."""
    canvas, limit = Canvas(title, width=WIDTH), next((row.plan.limit for row in rows if row.plan), 0)
    for number, panel in enumerate(PANELS):
        left = LEFT + number * PANEL
        canvas.text(left, 48, panel.name, "name")
        keys = [(color, words) for words, color in panel.kinds.values()]
        for line in range(0, len(keys), 2):
            canvas.legend(left, 66 + 8 * line, keys[line : line + 2])
        _bars(canvas, rows, panel, left, limit if panel.name == MEMORY else 0)
    for number, row in enumerate(rows):
        y = TOP + number * ROW + 15
        canvas.text(LEFT - 10, y, row.technique, "end")
        if row.plan is None:
            canvas.text(LEFT, y, row.why if len(row.why) <= 110 else f"{row.why[:107]}...", "soft")
    notes = [f"red: memory of a device, {memory_text(limit)}"] * bool(limit)
    notes += ["rings: measured here"] * any(isinstance(row.measured, dict) for row in rows)
    canvas.text(LEFT, TOP + len(rows) * ROW + 16, "; ".join(notes), "soft")
    return canvas.svg()


def _share(value: float) -> str:
    return f"{value:.1%}"


def _memory(row: Row) -> Mapping[str, float]:
    """The categories on the ranks that need most."""
    assert row.plan is not None
    return max(row.plan.memory, key=lambda held: held.total).as_json()


def _memory_here(row: Row) -> float:
    return float(row.measured.get("memory_bytes") or 0) if isinstance(row.measured, dict) else 0.0


def _sent_here(row: Row) -> float:
    sent = row.measured.get("sent_bytes") if isinstance(row.measured, dict) else None
    return float(sum((sent or {}).values()))


MEMORY = "Peak memory"
PANELS = (
    Panel(
        "Redundant computing",
        {kind: (words, color) for (kind, words), color in zip(REASONS.items(), NAMES, strict=False)},
        lambda row: row.redundant.parts,
        _share,
        lambda row: 0.0,
    ),
    Panel(
        MEMORY, {kind: (kind, color) for kind, color in COLORS.items()}, _memory, memory_text, _memory_here
    ),
    Panel(
        "Sent per step",
        {axis: (axis, color) for axis, color in zip(AXES, NAMES, strict=False)},
        lambda row: row.plan.sent if row.plan else {},
        size,
        _sent_here,
    ),
)


def _bars(canvas: Canvas, rows: Sequence[Row], panel: Panel, left: float, limit: float) -> None:
    """A bar for each row with a plan. limit: where an upright line is, if a bar reaches it; 0: nowhere."""
    sizes = {
        number: {kind: value for kind, value in panel.values(row).items() if kind in panel.kinds}
        for number, row in enumerate(rows)
        if row.plan
    }
    most = max([0, *(sum(parts.values()) for parts in sizes.values())])
    scale = BAR / (max(most, *map(panel.here, rows)) or 1.0)
    line = left + scale * limit if 0 < limit <= most else -1.0
    for number, parts in sizes.items():
        row, y = rows[number], TOP + number * ROW
        drawn = [
            (panel.kinds[kind][1], scale * value, f"{row.technique}: {kind} {panel.words(value)}")
            for kind, value in parts.items()
        ]
        canvas.bar(left, y, 20, drawn, panel.words(sum(parts.values())), line)
        if measured := panel.here(row):
            tip = f"measured: {panel.words(measured)}"
            canvas.circle("ring ink", left + scale * measured, y + 10, 5, tip)
    if line > 0:
        canvas.line("line limit", [(line, TOP - 4), (line, TOP + len(rows) * ROW + 4)])


CURVE, HIGH, GAP = 400, 190, 30  # pixels: a panel of a rule, with room for its words
KEYS = (("line limit", "the limit"), ("line now", "this recipe"), ("line blue", "the planner"))


def overlap(rows: Sequence[Row], title: str) -> str:
    """A panel for each rule, two side by side."""
    canvas = Canvas(title)
    canvas.legend(20, 48, KEYS)
    for number, rule in enumerate(rule for row in rows if row.plan for rule in row.rules):
        _rule(canvas, rule, 20 + number % 2 * (CURVE + 20), 64 + number // 2 * (HIGH + GAP))
    return canvas.svg()


def rule(one: Rule) -> str:
    """The panel of one rule, as a picture."""
    canvas = Canvas(about=f"{one.technique}: {one.what}")
    canvas.legend(8, 18, KEYS)
    _rule(canvas, one, 8, 28)
    return canvas.svg()


def _rule(canvas: Canvas, rule: Rule, left: float, top: float) -> None:
    """Messages over computing by the size that decides, both logarithmic, with the limit and the recipe's own size."""
    points = [(x, ratio) for x, ratio in rule.points if ratio > 0]
    sizes, ratios = [x for x, _ in points] + [rule.now], [ratio for _, ratio in points] + [rule.limit]
    across = log_scale(min(sizes) / 1.3, max(sizes) * 1.3)
    across = replace(across, ticks=across.ticks[:: max(1, math.ceil(len(across.ticks) / 7))])
    up = log_scale(min(ratios) / 1.1, max(ratios) * 1.1)
    axes = Axes(left + 64, top + 40, left + CURVE - 14, top + HIGH - 22, across, up)
    canvas.text(left, top + 12, f"{rule.technique}: {rule.what}", "name")
    canvas.text(left, top + 28, f"{rule.variable}: {rule.threshold}; {rule.verdict}", "soft")
    canvas.levels(axes, _labels(up.ticks))
    canvas.columns(axes, _labels(across.ticks), rule.variable, lines=False)
    canvas.line("line limit", [axes.at((x, rule.limit)) for x in (across.low, across.high)])
    canvas.line("line now", [(axes.x(rule.now), axes.top), (axes.x(rule.now), axes.bottom)])
    canvas.line("line blue", map(axes.at, points))
    for x, ratio in points:
        canvas.circle("blue", *axes.at((x, ratio)), 3.5, f"{count_text(x)}: {ratio:.3g}")
    late = "idle" if rule.what.startswith("idle") else "messages"
    middle = (axes.top + axes.bottom) / 2
    canvas.text(left + 10, middle, f"{late} / computing", "soft middle small", turned=True)


def _labels(ticks: Sequence[float]) -> list[str]:
    return [f"{value / 1000:g}k" if value >= 1000 else f"{value:g}" for value in ticks]


STATES = {"params": "weights", "gradients": "gradients", "optimizer": "masters, moments"}
"""Words for each kind of state."""
ACTIVATIONS = {"activations": ""}
TERM, RIGHT = 28, 80  # pixels: a row of terms, room for a sum behind its bar


def terms(rows: Mapping[str, Mapping[str, float]], kinds: Mapping[str, str], title: str) -> str:
    """A bar for each row: its bytes of each kind side by side, and their sum. kinds: `STATES` or `ACTIVATIONS`."""
    width = 760
    canvas, left = Canvas(title, width=width), 32 + max(map(text_width, rows))
    scale = (width - left - RIGHT) / max(sum(row.values()) for row in rows.values())
    if len(kinds) > 1:
        canvas.legend(20, 46, [(COLORS[kind], words) for kind, words in kinds.items()])
    for number, (name, row) in enumerate(rows.items()):
        y = (60 if len(kinds) > 1 else 40) + TERM * number
        canvas.text(20, y + 15, name)
        parts = [
            (COLORS[kind], row[kind] * scale, f"{name}: {words} {decimal(row[kind])}")
            for kind, words in kinds.items()
        ]
        canvas.bar(left, y, 20, parts, decimal(sum(row.values())))
    return canvas.svg()
