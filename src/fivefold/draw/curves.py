"""Draws lines and points over two axes, linear or logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fivefold.draw.canvas import NAMES, Axes, Canvas, Point
from fivefold.draw.scale import Scale, linear_scale, log_scale

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 400, 70, 200, 50, 46  # pixels, margins
DASHES = ("", " dashed", " dotted")


@dataclass(frozen=True)
class Line:
    """Points in the order of x. dots: drawn as points. line: drawn as a line. color: a number; dashes tell those apart
    that are more than there are colours. marks: points with a ring. name: of the legend; "": not in it."""

    name: str
    points: Sequence[Point]
    color: int = 0
    dots: bool = False
    line: bool = True
    marks: Sequence[Point] = ()

    @property
    def kind(self) -> str:
        dashes, color = divmod(self.color, len(NAMES))
        return f"{NAMES[color]}{DASHES[dashes % len(DASHES)]}"


def picture(
    title: str, lines: Sequence[Line], across: str, up: str, log: tuple[bool, bool] = (False, False)
) -> str:
    """The picture; "" without a point. across, up: what the axes show. log: which of them are logarithmic."""
    shown = [[p for p in line.points if all(map(math.isfinite, p))] for line in lines]
    points = [p for drawn in shown for p in drawn] + [p for line in lines for p in line.marks]
    if not points:
        return ""
    scales = (_scale([p[i] for p in points], log[i]) for i in (0, 1))
    axes = Axes(LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM, *scales)
    canvas = Canvas(title, width=WIDTH)
    canvas.axes(axes, across, up)
    for line, drawn in zip(lines, shown, strict=True):
        draw_line(canvas, axes, line, drawn)
    legend(canvas, WIDTH - RIGHT + 14, TOP + 8, lines)
    return canvas.svg()


def draw_line(canvas: Canvas, axes: Axes, line: Line, points: Sequence[Point]) -> None:
    """A line through some of its points, its dots with their values, and its marks."""
    if line.line and len(points) > 1:
        canvas.line(f"line {line.kind}", map(axes.at, points))
    if line.dots or len(points) == 1:
        for point in points:
            canvas.circle(line.kind, *axes.at(point), 3.5, f"{line.name}: {point[0]:.4g}, {point[1]:.4g}")
    for mark in line.marks:
        canvas.circle(f"ring {line.kind}", *axes.at(mark), 7)


def legend(canvas: Canvas, left: float, top: float, lines: Sequence[Line]) -> None:
    """The names, one under the other, as far as there is room."""
    named = [line for line in lines if line.name]
    for number, line in enumerate(named[: (HEIGHT - TOP) // 17]):
        y = top + 17 * number
        if line.line and line.dots:
            canvas.circle(line.kind, left + 6, y - 4, 3.5)
        canvas.legend(left, y, [(f"{'line' if line.line else 'dot'} {line.kind}", line.name)])


def _scale(values: Sequence[float], log: bool) -> Scale:
    low, high = min(values), max(values)
    return log_scale(low, high) if log and 0 < low < high else linear_scale(low, high, False)
