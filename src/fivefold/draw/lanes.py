"""Draws what happens over time as rows of boxes: pictures of pipelines, steps and workers, and strips of letters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fivefold.draw.canvas import Canvas, text_width, ticks

LEFT, RIGHT, TOP, GAP = 80, 100, 58, 7  # pixels: margins, space between lanes
BEHIND = 0.15  # pixels: a box that does not end so far behind the one before is left out


class Box(NamedTuple):
    """From `start` to `end`. label: shown if there is room. name: in the tip, if not the label."""

    start: float
    end: float
    kind: str
    label: str = ""
    name: str = ""


@dataclass(frozen=True)
class Lane:
    """Rows of boxes, one under the other, on a ground from 0 to `end`. words: behind it. high: pixels of a row."""

    name: str
    rows: Sequence[Sequence[Box]]
    end: float
    words: str = ""
    high: float = 26


def lanes(
    title: str,
    groups: Iterable[tuple[str, Sequence[Lane]]],
    legend: Iterable[tuple[str, str]],
    seconds: float,
    time: Callable[[float], str],
    width: float = 960,
    note: str = "",
    about: str = "",
) -> str:
    """Groups of lanes with their names, one under the other, on one scale.

    seconds: the time that the width stands for. time: a time in words. note: behind the legend. about: what the
    picture's name says besides its title, also at the right of it.
    """
    groups = list(groups)
    names = [text_width(lane.name) for _, group in groups for lane in group]
    left = max([LEFT, *(name + 20 for name in names)])
    scale = (width - left - RIGHT) / (seconds or 1.0)
    canvas = Canvas(title, left, width, f" ({about})" if about else "")
    canvas.text(width - 12, 22, about, "soft end")
    canvas.text(canvas.legend(left, 45, legend), 45, note, "soft")
    top = float(TOP)
    for name, group in groups:
        canvas.text(left, top + 10, name)
        top += 20 * bool(name)
        for lane in group:
            high = lane.high * len(lane.rows)
            middle, thin = top + high / 2 + 4, lane.high < 20
            canvas.text(left - 10, middle, lane.name, "soft end")
            canvas.rect("idle", left, top, lane.end * scale, high)
            for i, row in enumerate(lane.rows):
                drawn = 0.0
                for box in row:
                    if box.end * scale < drawn + BEHIND:
                        continue
                    drawn, wide = box.end * scale, (box.end - box.start) * scale
                    wide, y = max(0.3, wide - 0.6 if wide > 2 else wide), top + i * lane.high
                    tip = f"{box.name or box.label}: {time(box.start)} to {time(box.end)}"
                    canvas.box(box.kind, left + box.start * scale, y, wide, lane.high - thin, tip, box.label)
            canvas.text(left + lane.end * scale + 8, middle, lane.words, "soft")
            top += high + GAP
        top += 12 * bool(name)
    taken = 0.0
    for mark in ticks(0.0, seconds, count=10):
        x, half = left + mark * scale, text_width(time(mark)) / 2
        canvas.path("grid", f"M{x:.2f} {top - 4}v4")
        if x - half > taken:
            canvas.text(x, top + 14, time(mark), "soft middle")
            taken = x + half + 4
    return canvas.svg()


def time_text(seconds: float, whole: float = 0.0, digits: int = 3) -> str:
    """Seconds in the unit that suits `whole`, by default themselves: `1.25 ms`."""
    whole = whole or seconds or 1.0
    factor, unit = next(((f, u) for f, u in ((1, "s"), (1e3, "ms")) if whole * f >= 1), (1e6, "µs"))
    text = f"{seconds * factor:,.0f}" if seconds * factor >= 10**digits else f"{seconds * factor:.{digits}g}"
    return f"{text} {unit}"


def strip(spans: Iterable[tuple[float, float, str]], columns: int, seconds: float) -> list[str]:
    """Letters over time for terminals. spans: (start, end, letter); `columns` stand for `seconds`."""
    letters, scale = [" "] * columns, columns / (seconds or 1.0)
    for start, end, letter in spans:
        first = min(columns - 1, int(start * scale))
        for column in range(first, min(columns, max(first + 1, round(end * scale)))):
            letters[column] = letter
    return letters
