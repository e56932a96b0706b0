"""Draws lines and points over two axes, linear or logarithmic, as an SVG for light and dark themes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from fivefold.errors import printable
from fivefold.observe.palette import DARK, LIGHT
from fivefold.observe.scale import Scale, linear_scale, log_scale, tick_labels

Point = tuple[float, float]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 400, 70, 200, 50, 46  # pixels, margins
COLORS = len(LIGHT)
STYLE = (
    '.xy { color-scheme: light dark; max-width: 100%; height: auto; font: 12px system-ui, "Segoe UI", Roboto, '
    '"Liberation Sans", Arial, sans-serif; --paper: #fdfcf9; --ink: #22211f; --soft: #66625b; --rule: #e4e0d7; '
    + " ".join(f"--c{i}: {color};" for i, color in enumerate(LIGHT))
    + " }\n@media (prefers-color-scheme: dark) { .xy { --paper: #171614; --ink: #e9e6df; --soft: #a49f95; "
    "--rule: #35332e; " + " ".join(f"--c{i}: {color};" for i, color in enumerate(DARK)) + " } }\n"
    ".xy .paper { fill: var(--paper); } .xy text { fill: var(--ink); font-variant-numeric: tabular-nums; }\n"
    ".xy .soft { fill: var(--soft); } .xy .title { font-size: 15px; font-weight: 600; }\n"
    ".xy .end { text-anchor: end; } .xy .middle { text-anchor: middle; }\n"
    ".xy .grid { stroke: var(--rule); fill: none; }\n"
    ".xy .line { fill: none; stroke-width: 1.6; stroke-linejoin: round; } .xy .dashed { stroke-dasharray: 5 4; }\n"
    ".xy .mark { fill: none; stroke-width: 1.6; }\n"
    + "\n".join(
        f".xy .line.c{i}, .xy .mark.c{i} {{ stroke: var(--c{i}); }} .xy .dot.c{i} {{ fill: var(--c{i}); }}"
        for i in range(COLORS)
    )
    + "\n"
)


@dataclass(frozen=True)
class Line:
    """Points in the order of x. dots: drawn as points. line: drawn as a line, dashed if wanted. color: a number.
    marks: points with a ring. name: of the legend; "": not in it."""

    name: str
    points: Sequence[Point]
    color: int = 0
    dots: bool = False
    line: bool = True
    dashed: bool = False
    marks: Sequence[Point] = ()


def to_svg(
    title: str, lines: Sequence[Line], across: str, up: str, log: tuple[bool, bool] = (False, False)
) -> str:
    """The picture; "" without a point. across, up: what the axes show. log: which of them are logarithmic."""
    shown = [[p for p in line.points if all(map(math.isfinite, p))] for line in lines]
    points = [p for drawn in shown for p in drawn] + [p for line in lines for p in line.marks]
    if not points:
        return ""
    x_scale, y_scale = (_scale([p[i] for p in points], log[i]) for i in (0, 1))

    def at(point: Point) -> tuple[float, float]:
        return (
            LEFT + (WIDTH - LEFT - RIGHT) * x_scale.height(point[0]),
            HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y_scale.height(point[1]),
        )

    parts = [*_grid(x_scale, y_scale, at), _text(WIDTH - RIGHT, HEIGHT - 8, across, "soft end")]
    parts.append(_text(LEFT, TOP - 10, up, "soft"))
    for line, drawn in zip(lines, shown, strict=True):
        color = f"c{line.color % COLORS}"
        places = [at(point) for point in drawn]
        if line.line and len(places) > 1:
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
            dashed = " dashed" if line.dashed or line.color >= COLORS else ""
            parts.append(f'<path class="line {color}{dashed}" d="M{path}"/>')
        if line.dots or len(places) == 1:
            for (x, y), point in zip(places, drawn, strict=True):
                tip = escape(f"{line.name}: {point[0]:.4g}, {point[1]:.4g}")
                parts.append(
                    f'<circle class="dot {color}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{tip}</title></circle>'
                )
        for x, y in map(at, line.marks):
            parts.append(f'<circle class="mark {color}" cx="{x:.1f}" cy="{y:.1f}" r="7"/>')
    parts += _legend([line for line in lines if line.name])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="xy" role="img" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}">\n<title>{escape(title)}</title><style>{STYLE}</style>\n'
        f'<rect class="paper" width="100%" height="100%"/>\n'
        f'<text class="title" x="20" y="22">{escape(title)}</text>\n{"".join(parts)}</svg>\n'
    )


def _scale(values: Sequence[float], log: bool) -> Scale:
    low, high = min(values), max(values)
    return log_scale(low, high) if log and 0 < low < high else linear_scale(low, high, False)


def _grid(x_scale: Scale, y_scale: Scale, at) -> list[str]:
    parts = []
    for tick, words in zip(y_scale.ticks, tick_labels(y_scale.ticks), strict=True):
        _, y = at((x_scale.low, tick))
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 8, y + 4, words, "soft end"))
    taken = -math.inf
    for tick, words in zip(x_scale.ticks, tick_labels(x_scale.ticks), strict=True):
        x, _ = at((tick, y_scale.low))
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        if x - 4 * len(words) > taken:  # labels do not overlap
            parts.append(_text(x, HEIGHT - BOTTOM + 17, words, "soft middle"))
            taken = x + 4 * len(words)
    return parts


def _legend(lines: Sequence[Line]) -> list[str]:
    parts, left = [], WIDTH - RIGHT + 14
    for number, line in enumerate(lines[: (HEIGHT - TOP) // 17]):
        y, color = TOP + 8 + 17 * number, f"c{line.color % COLORS}"
        if line.line:
            dashed = " dashed" if line.dashed or line.color >= COLORS else ""
            parts.append(f'<path class="line {color}{dashed}" d="M{left} {y - 4}h18"/>')
        if line.dots:
            parts.append(f'<circle class="dot {color}" cx="{left + 9}" cy="{y - 4}" r="3.5"/>')
        parts.append(_text(left + 24, y, line.name))
    return parts


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(printable(words))}</text>'
