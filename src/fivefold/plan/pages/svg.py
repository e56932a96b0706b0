"""Draws a plan as SVG: memory of each stage, the roofline, a frontier."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fivefold.draw.canvas import Axes, Canvas, text_width
from fivefold.draw.scale import Scale, linear_scale
from fivefold.host.devices import GIB
from fivefold.observe.format import memory_text
from fivefold.observe.memory_picture import COLORS

if TYPE_CHECKING:
    from fivefold.plan.pages.pictures import Point, Roofline
    from fivefold.plan.predict import Plan

WIDTH, LEFT, RIGHT, TOP, FLOOR = 760, 84, 96, 62, 330  # pixels: margins, lower edge of two axes
BOUND = {"compute": "blue", "memory": "orange"}
"""Colours of operations by what bounds them."""


def memory(plan: Plan, title: str) -> str:
    """A bar for each pipeline rank, and the limit."""
    scale = (WIDTH - LEFT - RIGHT) / max(plan.limit, *(m.total for m in plan.memory))
    limit, canvas = LEFT + plan.limit * scale, Canvas(title, LEFT, WIDTH)
    canvas.legend(LEFT, 46, [(color, name) for name, color in COLORS.items()])
    for position, held in enumerate(plan.memory):
        top, sizes = TOP + 30 * position, {name: getattr(held, name) for name in COLORS}
        canvas.text(LEFT - 10, top + 16, f"stage {position}", "soft end")
        parts = [(COLORS[name], size * scale, f"{name} {memory_text(size)}") for name, size in sizes.items()]
        canvas.bar(LEFT, top, 22, parts, memory_text(held.total), limit)
    bottom = TOP + 30 * len(plan.memory)
    canvas.line("line limit", [(limit, TOP - 6), (limit, bottom)])
    canvas.text(limit, bottom + 16, f"limit {memory_text(plan.limit)}", "soft middle")
    return canvas.svg()


def roofline(found: Roofline, step: float, title: str) -> str:
    """A circle for each operation, as large as its share of the step; work of which only bytes are counted at the left.

    step: its seconds.
    """
    products = [p for p in found.points if p.flops]
    (low, high, bottom), top = found.ends, found.peak * 1.6
    axes = Axes(LEFT + 60, TOP, WIDTH - 24, FLOOR, _decades(low, high), _decades(bottom, top))
    canvas = Canvas(title, LEFT, WIDTH)
    canvas.legend(LEFT, 46, [(color, f"{name}-bound") for name, color in BOUND.items()])
    canvas.levels(replace(axes, left=LEFT), [_rate(rate) for rate in axes.up.ticks])
    canvas.columns(axes, [f"{value:,g}" for value in axes.across.ticks], "FLOP per byte moved")
    canvas.text(LEFT + 26, FLOOR + 17, "bytes only", "soft middle")
    start = max(low, bottom / found.bandwidth)
    roof = [(start, start * found.bandwidth), (found.ridge, found.peak), (high, found.peak)]
    canvas.line("line ink", map(axes.at, roof))
    canvas.text(axes.right, axes.y(found.peak) - 7, f"{found.peak / 1e12:,.0f} TFLOP/s", "soft end")
    level = FLOOR - 6.0
    for p in sorted(found.points, key=lambda p: -p.seconds):
        radius, bound = max(2.5, 50 * math.sqrt(p.seconds / step / math.pi)), found.bound(p)
        if p.flops:
            center = axes.at((p.intensity, p.rate))
        else:
            center = LEFT + 26, level - radius
            level -= 2 * radius + 3
        tip = f"{p.name}: {p.seconds / step:.1%} of the step, bound by {bound}"
        canvas.circle(f"{BOUND[bound]} pale", *center, radius, tip)
    for p in _with_room(products, axes):
        canvas.text(axes.x(p.intensity), axes.y(p.rate) + 30, p.name, "middle")
    return canvas.svg()


def _with_room(products: Sequence[Point], axes: Axes) -> list[Point]:
    """The points whose names do not overlap, the largest first."""
    taken: list[Point] = []
    for p in sorted(products, key=lambda p: -p.seconds):
        near = (
            abs(axes.x(q.intensity) - axes.x(p.intensity)) < 4 + text_width(p.name + q.name) / 2
            and abs(axes.y(q.rate) - axes.y(p.rate)) < 14
            for q in taken
        )
        if not any(near):
            taken.append(p)
    return taken


def frontier(rows: Sequence[Mapping[str, Any]], limit: float, title: str) -> str:
    """Throughput against memory, with a list of the layouts. rows: {peak, tokens_per_s, words}, by memory."""
    up = linear_scale(0, max(row["tokens_per_s"] for row in rows), True)
    axes = Axes(LEFT, TOP, WIDTH - 24, FLOOR, linear_scale(0, limit / GIB, True), up)
    canvas = Canvas(title, LEFT, WIDTH)
    canvas.axes(axes, "GiB per device", "tokens/s")
    edge = axes.x(limit / GIB)
    canvas.line("line limit", [(edge, TOP), (edge, FLOOR)])
    canvas.text(edge - 6, FLOOR - 6, "limit", "soft end")
    places = [axes.at((row["peak"] / GIB, row["tokens_per_s"])) for row in rows]
    steps = "".join(f"H{x:.1f}V{y:.1f}" for x, y in places[1:])
    canvas.path("line blue", f"M{places[0][0]:.1f} {places[0][1]:.1f}{steps}")
    for number, (row, (x, y)) in enumerate(zip(rows, places, strict=True), 1):
        words = f"{memory_text(row['peak'])}, {row['tokens_per_s']:,.0f}/s: {row['words']}"
        canvas.circle("blue", x, y, 4.5)
        canvas.text(x, y - 9, str(number), "middle")
        canvas.text(30, FLOOR + 44 + 17 * number, str(number), "soft end")
        canvas.text(38, FLOOR + 44 + 17 * number, words, "small")
    return canvas.svg()


def _rate(value: float) -> str:
    return f"{value / 1e15:g} PFLOP/s" if value >= 1e15 else f"{value / 1e12:g} TFLOP/s"


def _decades(low: float, high: float) -> Scale:
    """A logarithmic scale from end to end, with ticks at powers of ten."""
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    return Scale(low, high, [10.0**power for power in powers], log=True)
