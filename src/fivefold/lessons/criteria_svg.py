"""Draws the three criteria of layouts as bars, and when messages hide as curves. Both work in light and dark mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from fivefold.observe.format import memory_text, size
from fivefold.observe.scale import log_scale
from fivefold.plan.pages.svg import KINDS, beside, caption, document, legend

if TYPE_CHECKING:
    from fivefold.lessons.compare import Row
    from fivefold.lessons.overlap import Rule

WIDTH, LEFT, PANEL, BAR, ROW = 860, 96, 255, 160, 26  # pixels: bars of a panel, and their values beside them
TOP = 108
REASONS = {"operations": "activations", "recompute": "recompute", "sums": "sums", "update": "updates"}
AXES = ("dp", "tp", "cp", "pp", "ep")
_COLOURS = dict(
    zip((*REASONS, *AXES), (*KINDS[:4], *KINDS), strict=True)  # those of memory, which both modes have
)
STYLE = "".join(f".plan .{name} {{ fill: var(--{kind}); }}\n" for name, kind in _COLOURS.items()) + (
    ".plan .here { fill: none; stroke: var(--ink); stroke-width: 1.75; } .plan .line { stroke: var(--params); "
    "stroke-width: 1.75; fill: none; } .plan .now { stroke: var(--soft); stroke-dasharray: 3 3; }\n"
)
Panel = Callable[["Row"], Mapping[str, float]]


def criteria(rows: Sequence[Row], title: str) -> str:
    """A line per layout: its redundant computing, memory and bytes sent as bars, what was measured as a ring."""
    panels = (
        ("Redundant computing", REASONS, lambda row: row.redundant.parts, _share, None),
        ("Peak memory", dict.fromkeys(KINDS), _memory, memory_text, _memory_here),
        (
            "Sent per step",
            dict.fromkeys(AXES),
            lambda row: row.plan.sent if row.plan else {},
            size,
            _sent_here,
        ),
    )
    limit = next((row.plan.limit for row in rows if row.plan), 0)
    most = max((row.plan.peak_bytes for row in rows if row.plan), default=0)
    limit_at = -math.inf  # beyond the bars
    if 0 < limit <= most:
        limit_at = LEFT + PANEL + BAR * limit / max(most, *map(_memory_here, rows))
    parts = []
    for number, (name, kinds, values, words, here) in enumerate(panels):
        left = LEFT + number * PANEL
        parts.append(caption(left, 48, name, "name"))
        parts.append(_keys([(kind, str(text or kind)) for kind, text in kinds.items()], left))
        parts.append(_bars(rows, left, values, words, here, limit_at if number == 1 else -math.inf))
    for number, row in enumerate(rows):
        y = TOP + number * ROW + 15
        parts.append(caption(LEFT - 10, y, row.technique, "end"))
        if row.plan is None:
            parts.append(caption(LEFT, y, _short(row.why), "soft"))
    notes = [f"red: memory of a device, {memory_text(limit)}"] * bool(limit)
    notes += ["rings: measured here"] * any(isinstance(row.measured, dict) for row in rows)
    bottom = TOP + len(rows) * ROW + 16
    if limit_at > 0:
        parts.append(f'<path class="limit" d="M{limit_at:.1f} {TOP - 4}V{bottom - 12}"/>')
    parts.append(caption(LEFT, bottom, "; ".join(notes), "soft"))
    return document(title, "".join(parts), bottom + 14, WIDTH, 20, STYLE)


def _keys(kinds: Sequence[tuple[str, str]], left: float) -> str:
    """The legend of a panel, two kinds in a line."""
    lines = [kinds[i : i + 2] for i in range(0, len(kinds), 2)]
    return "".join(
        legend([k for k, _ in line], [words for _, words in line], left, 56 + 16 * number)
        for number, line in enumerate(lines)
    )


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


def _bars(
    rows: Sequence[Row],
    left: float,
    values: Panel,
    words: Callable[[float], str],
    here: Callable[[Row], float] | None,
    line: float,
) -> str:
    """line: the place of an upright line that no number may touch."""
    kinds = (*REASONS, *KINDS, *AXES)
    found = [{k: v for k, v in values(row).items() if k in kinds} if row.plan else {} for row in rows]
    most = max([*(sum(parts.values()) for parts in found), *(here(row) for row in rows if here)]) or 1.0
    drawn = []
    for number, (row, parts) in enumerate(zip(rows, found, strict=True)):
        if row.plan is None:
            continue
        x, y = left, TOP + number * ROW
        for kind, value in parts.items():
            wide, told = BAR * value / most, escape(f"{row.technique}: {kind} {words(value)}")
            drawn.append(
                f'<rect class="{kind}" x="{x:.2f}" y="{y}" width="{max(0.0, wide - 0.6):.2f}" height="20">'
                f"<title>{told}</title></rect>"
            )
            x += wide
        total = words(sum(parts.values()))
        drawn.append(caption(beside(x + 6, total, line), y + 15, total))
        if here and (measured := here(row)):
            place = left + BAR * measured / most
            drawn.append(
                f'<circle class="here" cx="{place:.1f}" cy="{y + 10}" r="5"><title>measured: {words(measured)}'
                "</title></circle>"
            )
    return "".join(drawn)


def _short(words: str) -> str:
    return words if len(words) <= 110 else f"{words[:107]}..."


CURVE, HIGH, GAP = 400, 190, 30  # pixels: a panel of a rule, with room for its words


def overlap(rows: Sequence[Row], title: str) -> str:
    """A panel for each rule, two side by side."""
    found = [rule for row in rows if row.plan for rule in row.rules]
    parts = [_lines(20, 44)] + [
        panel(rule, 20 + number % 2 * (CURVE + 20), 64 + number // 2 * (HIGH + GAP))
        for number, rule in enumerate(found)
    ]
    height = 64 + math.ceil(len(found) / 2) * (HIGH + GAP) + 20
    return document(title, "".join(parts), height, 2 * CURVE + 60, 20, STYLE)


def _lines(left: float, top: float) -> str:
    """The legend of the panels."""
    parts = []
    for kind, words in (("line", "the formula"), ("limit", "the limit"), ("now", "this recipe")):
        parts.append(f'<path class="{kind}" d="M{left} {top}h18"/>')
        parts.append(caption(left + 24, top + 4, words, "soft"))
        left += 110
    dot = f'<circle class="dot" cx="{left + 9}" cy="{top}" r="3.5"/>'
    return "".join([*parts, dot, caption(left + 24, top + 4, "the planner", "soft")])


def one(rule: Rule) -> str:
    """The panel of one rule, as a picture."""
    return document("", _lines(8, 14) + panel(rule, 8, 28), HIGH + GAP + 26, CURVE + 16, 20, STYLE)


def panel(rule: Rule, left: float, top: float) -> str:
    """Messages over computing by the size that decides, both logarithmic: the formula as a line, the planner's figures
    as dots, the threshold, and the recipe's own size."""
    sizes = [x for x, _ in rule.points] + [rule.now]
    if math.isfinite(rule.needed) and rule.needed > 0:
        sizes.append(rule.needed)
    constant = rule.needed * rule.limit  # ratio = constant / x
    across = log_scale(min(sizes) / 1.3, max(sizes) * 1.3)
    heights = [constant / x for x in (across.low, across.high)] + [y for _, y in rule.points] + [rule.limit]
    up = log_scale(min(y for y in heights if y > 0), max(heights))
    x0, y0, wide, high = left + 64, top + 40, CURVE - 78, HIGH - 62

    def x(value: float) -> float:
        return x0 + wide * across.height(value)

    def y(value: float) -> float:
        return y0 + high * (1 - up.height(value))

    parts = [
        caption(left, top + 12, f"{rule.technique}: {rule.what}", "name"),
        caption(left, top + 28, f"{rule.variable} >= {_count(rule.needed)}: {rule.verdict}", "soft"),
    ]
    for value, words in zip(up.ticks, _labels(up.ticks), strict=True):
        parts.append(f'<path class="grid" d="M{x0:.1f} {y(value):.1f}h{wide}"/>')
        parts.append(caption(x0 - 6, y(value) + 4, words, "soft end small"))
    few = across.ticks[:: max(1, math.ceil(len(across.ticks) / 7))]
    for value, words in zip(few, _labels(few), strict=True):
        parts.append(caption(x(value), y0 + high + 16, words, "soft middle small"))
    parts.append(f'<path class="limit" d="M{x0:.1f} {y(rule.limit):.1f}h{wide}"/>')
    parts.append(f'<path class="now" d="M{x(rule.now):.1f} {y0:.1f}v{high}"/>')
    ends = "L".join(f"{x(v):.1f} {y(constant / v):.1f}" for v in (across.low, across.high))
    parts.append(f'<path class="line" d="M{ends}"/>')
    for size_, ratio in rule.points:
        if ratio > 0:
            told = f"{_count(size_)}: {ratio:.3g} by the planner"
            parts.append(
                f'<circle class="dot" cx="{x(size_):.1f}" cy="{y(ratio):.1f}" r="3.5"><title>{told}</title></circle>'
            )
    parts.append(caption(x0 + wide, y0 + high + 32, rule.variable, "soft end"))
    late = "idle" if rule.what.startswith("idle") else "messages"
    turned = f'transform="rotate(-90 {left + 10:.1f} {y0 + high / 2:.1f})"'
    parts.append(caption(left + 10, y0 + high / 2, f"{late} / computing", "soft middle small", turned))
    return "".join(parts)


def _labels(ticks: Sequence[float]) -> list[str]:
    return [f"{value / 1000:g}k" if value >= 1000 else f"{value:g}" for value in ticks]


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
