"""Draws a plan as SVG: memory of each stage, the roofline, a frontier. The pictures work in light and dark mode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from fivefold.host.devices import GIB
from fivefold.observe.format import memory_text
from fivefold.observe.memory_picture import DARK, LIGHT
from fivefold.observe.scale import linear_scale, tick_labels
from fivefold.schedules.memory_timeline import CATEGORIES

if TYPE_CHECKING:
    from fivefold.plan.pages.pictures import Point, Roofline
    from fivefold.plan.predict import Plan

WIDTH, LEFT, RIGHT, TOP = 760, 84, 96, 62  # pixels
KINDS = tuple(CATEGORIES)
STYLE = (
    """
.plan { color-scheme: light dark; font: 12px system-ui, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif;
  --paper: #fdfcf9; --ink: #22211f; --soft: #66625b; --rule: #d8d3c8; --idle: #f0ede5; --bad: #c22f2f;
  """
    + LIGHT
    + """ }
@media (prefers-color-scheme: dark) { .plan { --paper: #171614; --ink: #e9e6df; --soft: #a49f95; --rule: #45423b;
  --idle: #24221f; --bad: #ff7b72; """
    + DARK
    + """ } }
.plan .paper { fill: var(--paper); } .plan text { fill: var(--ink); font-variant-numeric: tabular-nums; }
.plan .soft { fill: var(--soft); } .plan .title { font-size: 15px; font-weight: 600; } .plan .end { text-anchor: end; }
.plan .middle { text-anchor: middle; } .plan .small { font-size: 11px; }
.plan .idle { fill: var(--idle); } .plan .grid { stroke: var(--rule); fill: none; }
.plan .roof { stroke: var(--ink); stroke-width: 1.5; fill: none; } .plan .limit { stroke: var(--bad); stroke-width: 2; }
.plan .params, .plan .compute, .plan .dot { fill: var(--params); } .plan .gradients { fill: var(--gradients); }
.plan .optimizer, .plan .memory { fill: var(--optimizer); } .plan .activations { fill: var(--activations); }
.plan .buffers { fill: var(--buffers); } .plan circle { fill-opacity: 0.75; }
.plan .best { stroke: var(--params); stroke-width: 1.75; fill: none; }
"""
)


def memory(plan: Plan, title: str) -> str:
    """A bar for each pipeline rank, and the limit."""
    most = max(plan.limit, *(m.total for m in plan.memory))
    scale, parts = (WIDTH - LEFT - RIGHT) / most, [legend(KINDS, KINDS)]
    limit = LEFT + plan.limit * scale
    for position, held in enumerate(plan.memory):
        top, left = TOP + 30 * position, float(LEFT)
        parts.append(caption(LEFT - 10, top + 16, f"stage {position}", "soft end"))
        for name in KINDS:
            size = getattr(held, name)
            words = f"<title>{name} {memory_text(size)}</title>"
            wide = max(0.0, size * scale - 0.8)
            parts.append(
                f'<rect class="{name}" x="{left:.2f}" y="{top}" width="{wide:.2f}" height="22">{words}</rect>'
            )
            left += size * scale
        words = memory_text(held.total)
        parts.append(caption(beside(left + 8, words, limit), top + 16, words))
    bottom = TOP + 30 * len(plan.memory)
    parts.append(f'<path class="limit" d="M{limit:.2f} {TOP - 6}V{bottom}"/>')
    parts.append(caption(limit, bottom + 16, f"limit {memory_text(plan.limit)}", "soft middle"))
    return document(title, "".join(parts), bottom + 28)


def roofline(found: Roofline, step: float, title: str) -> str:
    """A circle for each operation, as large as its share of the step; work of which only bytes are counted at the left.

    step: its seconds.
    """
    products = [p for p in found.points if p.flops]
    low = min(found.ridge / 10, *(p.intensity for p in products)) / 1.5
    high = max(found.ridge * 10, *(p.intensity for p in products)) * 1.5
    bottom, top = min(low * found.bandwidth, *(p.rate for p in products)) / 1.5, found.peak * 1.6
    floor, left, right = 330, LEFT + 60, WIDTH - 24

    def x(value: float) -> float:
        return left + (right - left) * math.log(value / low) / math.log(high / low)

    def y(value: float) -> float:
        return floor - (floor - TOP) * math.log(value / bottom) / math.log(top / bottom)

    parts = [legend(("compute", "memory"), ("compute-bound", "memory-bound"))]
    for rate in _decades(bottom, top):
        parts.append(f'<path class="grid" d="M{LEFT} {y(rate):.1f}H{right}"/>')
        parts.append(caption(LEFT - 8, y(rate) + 4, _rate(rate), "soft end"))
    for value in _decades(low, high):
        parts.append(f'<path class="grid" d="M{x(value):.1f} {TOP}V{floor}"/>')
        parts.append(caption(x(value), floor + 17, f"{value:,g}", "soft middle"))
    parts.append(caption(right, floor + 36, "FLOP per byte moved", "soft end"))
    parts.append(caption(LEFT + 26, floor + 17, "bytes only", "soft middle"))
    start = max(low, bottom / found.bandwidth)
    parts.append(
        f'<path class="roof" d="M{x(start):.1f} {y(start * found.bandwidth):.1f}'
        f'L{x(found.ridge):.1f} {y(found.peak):.1f}H{right}"/>'
    )
    parts.append(caption(right, y(found.peak) - 7, f"{found.peak / 1e12:,.0f} TFLOP/s", "soft end"))
    level = floor - 6.0
    for p in sorted(found.points, key=lambda p: -p.seconds):
        radius = max(2.5, 50 * math.sqrt(p.seconds / step / math.pi))
        if p.flops:
            parts.append(_circle(found, p, step, x(p.intensity), y(p.rate), radius))
        else:
            parts.append(_circle(found, p, step, LEFT + 26, level - radius, radius))
            level -= 2 * radius + 3
    for p in _with_room(products, x, y):
        parts.append(caption(x(p.intensity), y(p.rate) + 30, p.name, "middle"))
    return document(title, "".join(parts), floor + 46)


def _circle(found: Roofline, p: Point, step: float, x: float, y: float, radius: float) -> str:
    bound = found.bound(p)
    words = f"{p.name}: {p.seconds / step:.1%} of the step, bound by {bound}"
    return f'<circle class="{bound}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"><title>{escape(words)}</title></circle>'


def _with_room(products: Sequence[Point], x: Any, y: Any) -> list[Point]:
    """The points whose names do not overlap, the largest first."""
    taken: list[Point] = []
    for p in sorted(products, key=lambda p: -p.seconds):
        near = (
            abs(x(q.intensity) - x(p.intensity)) < 4 + 3.4 * (len(p.name) + len(q.name))
            and abs(y(q.rate) - y(p.rate)) < 14
            for q in taken
        )
        if not any(near):
            taken.append(p)
    return taken


def frontier(rows: Sequence[Mapping[str, Any]], limit: float, title: str) -> str:
    """Throughput against memory, with a list of the layouts. rows: {peak, tokens_per_s, words}, by memory."""
    floor, right = 330, WIDTH - 24
    across = linear_scale(0, limit / GIB, True)
    up = linear_scale(0, max(row["tokens_per_s"] for row in rows), True)

    def x(size: float) -> float:
        return LEFT + (right - LEFT) * across.height(size / GIB)

    def y(speed: float) -> float:
        return floor - (floor - TOP) * up.height(speed)

    parts = []
    for value, words in zip(up.ticks, tick_labels(up.ticks), strict=True):
        parts.append(f'<path class="grid" d="M{LEFT} {y(value):.1f}H{right}"/>')
        parts.append(caption(LEFT - 8, y(value) + 4, words, "soft end"))
    for value, words in zip(across.ticks, tick_labels(across.ticks), strict=True):
        parts.append(caption(x(value * GIB), floor + 17, words, "soft middle"))
    parts.append(caption(right, floor + 36, "GiB per device", "soft end"))
    parts.append(caption(LEFT - 8, TOP - 14, "tokens/s", "soft end"))
    parts.append(f'<path class="limit" d="M{x(limit):.1f} {TOP}V{floor}"/>')
    parts.append(caption(x(limit) - 6, floor - 6, "limit", "soft end"))
    path = f"M{x(rows[0]['peak']):.1f} {y(rows[0]['tokens_per_s']):.1f}"
    path += "".join(f"H{x(row['peak']):.1f}V{y(row['tokens_per_s']):.1f}" for row in rows[1:])
    parts.append(f'<path class="best" d="{path}"/>')
    for number, row in enumerate(rows, 1):
        place = (x(row["peak"]), y(row["tokens_per_s"]))
        words = f"{memory_text(row['peak'])}, {row['tokens_per_s']:,.0f}/s: {row['words']}"
        parts.append(f'<circle class="dot" cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="4.5"/>')
        parts.append(caption(place[0], place[1] - 9, str(number), "middle"))
        parts.append(caption(30, floor + 44 + 17 * number, str(number), "soft end"))
        parts.append(caption(38, floor + 44 + 17 * number, words, "small"))
    return document(title, "".join(parts), floor + 60 + 17 * len(rows))


def _rate(value: float) -> str:
    return f"{value / 1e15:g} PFLOP/s" if value >= 1e15 else f"{value / 1e12:g} TFLOP/s"


def _decades(low: float, high: float) -> list[float]:
    return [10.0**n for n in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]


def legend(kinds: Sequence[str], words: Sequence[str], left: float = LEFT, top: float = 36) -> str:
    """A coloured square and words for each kind."""
    parts = []
    for kind, text in zip(kinds, words, strict=True):
        parts.append(f'<rect class="{kind}" x="{left:g}" y="{top:g}" width="12" height="12"/>')
        parts.append(caption(left + 18, top + 10, text, "soft"))
        left += 44 + 6.4 * len(text)
    return "".join(parts)


def beside(x: float, words: str, line: float) -> float:
    """Where words that begin at `x` go, so that no upright line crosses them: behind `line` if it would."""
    return line + 6 if x - 4 < line < x + 7 * len(words) else x


def caption(x: float, y: float, words: str, kind: str = "", turned: str = "") -> str:
    """Words at a place. turned: a `transform` attribute."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{turned and f" {turned}"}>{escape(words)}</text>'


def document(
    title: str, body: str, height: float, width: float = WIDTH, left: float = LEFT, style: str = ""
) -> str:
    """A picture with its title. left: of the title. style: rules besides `STYLE`."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plan" role="img" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}">\n<title>{escape(title)}</title><style>{STYLE}{style}</style>\n'
        f'<rect class="paper" width="100%" height="100%"/>\n'
        f'<text class="title" x="{left:g}" y="22">{escape(title)}</text>\n{body}</svg>\n'
    )
