"""Draws a timeline as text for terminals, and as a standalone SVG for light and dark themes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from html import escape

from fivefold.schedules.pipeline.action import Action
from fivefold.schedules.timeline import Event, Timeline

FILL = {"F": "─", "B": "═", "I": "╌", "W": "┄"}
COLOR = {"F": "97;44", "B": "97;42", "I": "97;42", "W": "30;43"}  # ANSI: text and background
NAMES = {"F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradients of the weights"}
LEFT, RIGHT, TOP, ROW, GAP = 64, 84, 58, 26, 6  # pixels: margins, height of a rank, space between ranks
STYLE = """
.pipeline { color-scheme: light dark; font: 12px system-ui, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif;
  --paper: #fdfcf9; --ink: #22211f; --soft: #66625b; --rule: #d8d3c8; --idle: #f0ede5; --on: #ffffff;
  --F: #1d5b9c; --B: #2c7a5b; --I: #2c7a5b; --W: #9c5410; }
@media (prefers-color-scheme: dark) { .pipeline { --paper: #171614; --ink: #e9e6df; --soft: #a49f95; --rule: #45423b;
  --idle: #24221f; --on: #171614; --F: #7fb2ea; --B: #79c9a3; --I: #79c9a3; --W: #f0b06a; } }
.pipeline .paper { fill: var(--paper); } .pipeline text { fill: var(--ink); font-variant-numeric: tabular-nums; }
.pipeline .soft { fill: var(--soft); } .pipeline .title { font-size: 15px; font-weight: 600; }
.pipeline .idle { fill: var(--idle); } .pipeline .tick { stroke: var(--rule); }
.pipeline .F { fill: var(--F); } .pipeline .B { fill: var(--B); } .pipeline .I { fill: var(--I); }
.pipeline .W { fill: var(--W); } .pipeline .later { fill-opacity: 0.78; }
.pipeline .label { fill: var(--on); font-size: 11px; text-anchor: middle; }
"""


def to_text(timeline: Timeline[Action], columns: int = 100, color: bool = False) -> str:
    """One line per rank: its actions over time, blank while it is idle, and its idle share.

    An action begins with its kind and microbatch, `F3`, or `f3` if the rank also has an earlier stage. If there is no
    room for both, only the kind is shown. `columns`: for the whole makespan. `color`: with ANSI colours.
    """
    width = len(str(timeline.ranks - 1))
    lines = [
        f"rank {rank:>{width}} │{_line(timeline, rank, columns, color)}│ {timeline.idle_share(rank):6.1%} idle"
        for rank in range(timeline.ranks)
    ]
    return "\n".join(lines) + "\n"


def _line(timeline: Timeline[Action], rank: int, columns: int, color: bool) -> str:
    scale = columns / timeline.makespan if timeline.makespan else 0.0
    first_stage = min((event.action.stage for event in timeline.rows[rank]), default=0)
    line, here = "", 0
    for action, *times in timeline.rows[rank]:
        start, end = (round((time - timeline.start) * scale) for time in times)
        line += " " * (start - here) + _word(action, end - start, action.stage > first_stage, color)
        here = end
    return line + " " * (columns - here)


def _word(action: Action, width: int, later: bool, color: bool) -> str:
    """The action in `width` characters. later: it belongs to a later stage of the rank."""
    label = f"{action.kind}{action.microbatch}"
    if len(label) > width:
        label = action.kind
    word = ((label.lower() if later else label) + width * FILL[action.kind])[:width]
    return f"\x1b[{COLOR[action.kind]}m{word}\x1b[0m" if color and word else word


def to_svg(
    timeline: Timeline[Action],
    title: str = "",
    width: int = 960,
    seconds: float | None = None,
    unit: str = "",
) -> str:
    """The timeline as an SVG document, `width` pixels wide.

    Each action shows its microbatch if there is room, and its text and times as a tooltip. A rank's later stages are
    paler. `seconds`: the time that the width stands for, if not the makespan, so that several timelines share a scale.
    `unit`: what times count, if not seconds, such as "forward".
    """
    seconds = seconds or timeline.makespan or 1.0
    bottom = TOP + timeline.ranks * (ROW + GAP)
    scale, time = (width - LEFT - RIGHT) / seconds, partial(_time, whole=seconds, unit=unit)
    words = f"{timeline.ranks} ranks, {time(timeline.makespan)}, {timeline.bubble:.1%} idle"
    rows = "".join(_rank(timeline, rank, scale, time) for rank in range(timeline.ranks))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pipeline" role="img" width="{width}" '
        f'height="{bottom + 26}" viewBox="0 0 {width} {bottom + 26}">\n<title>{escape(title)} ({words})</title>'
        f'<style>{STYLE}</style>\n<rect class="paper" width="100%" height="100%"/>\n'
        f'<text class="title" x="{LEFT}" y="22">{escape(title)}</text>'
        f'<text class="soft" x="{width - RIGHT}" y="22" text-anchor="end">{words}</text>\n'
        f"{_legend(timeline)}{rows}{_axis(seconds, scale, bottom, time)}</svg>\n"
    )


def _rank(timeline: Timeline[Action], rank: int, scale: float, time: Callable[[float], str]) -> str:
    """Draws one rank: its name, its actions and its idle share."""
    top = TOP + rank * (ROW + GAP)
    middle = top + ROW / 2 + 4
    stages = sorted({event.action.stage for event in timeline.rows[rank]})
    end = LEFT + timeline.makespan * scale
    cells = "".join(
        _cell(event, timeline.start, top, scale, time, stages.index(event.action.stage) > 0)
        for event in timeline.rows[rank]
    )
    return (
        f'<text class="soft" x="{LEFT - 10}" y="{middle}" text-anchor="end">rank {rank}</text>'
        f'<rect class="idle" x="{LEFT}" y="{top}" width="{end - LEFT:.2f}" height="{ROW}"/>{cells}'
        f'<text class="soft" x="{end + 10:.2f}" y="{middle}">{timeline.idle_share(rank):.1%} idle</text>\n'
    )


def _cell(
    event: Event[Action], origin: float, top: int, scale: float, time: Callable[[float], str], later: bool
) -> str:
    """Draws one action, with a small gap before the next."""
    action = event.action
    left, wide = LEFT + (event.start - origin) * scale, (event.end - event.start) * scale
    label = str(action.microbatch)
    span = f"{time(event.start - origin)} to {time(event.end - origin)}"
    text = f'<text class="label" x="{left + wide / 2:.2f}" y="{top + ROW / 2 + 4}">{label}</text>'
    return (
        f'<g><title>{action}: {span}</title><rect class="{action.kind}{" later" * later}" x="{left:.2f}" '
        f'y="{top}" width="{max(0.2, wide - 0.8):.2f}" height="{ROW}"/>'
        f"{text if wide >= 6 + 6 * len(label) else ''}</g>"
    )


def _legend(timeline: Timeline[Action]) -> str:
    """Draws a legend of the kinds of action in the timeline."""
    there = {event.action.kind for event in timeline.events()}
    left, parts = LEFT, []
    for kind in filter(there.__contains__, NAMES):
        parts.append(f'<rect class="{kind}" x="{left}" y="35" width="12" height="12"/>')
        parts.append(f'<text class="soft" x="{left + 18}" y="45">{kind} {NAMES[kind]}</text>')
        left += 42 + 7 * len(NAMES[kind])
    if any(len({event.action.stage for event in row}) > 1 for row in timeline.rows):
        parts.append(f'<text class="soft" x="{left}" y="45">paler: a rank\'s later stages</text>')
    return "".join(parts) + "\n"


def _axis(seconds: float, scale: float, bottom: int, time: Callable[[float], str]) -> str:
    """Draws a time axis with round numbers below the ranks."""
    step = 10 ** math.floor(math.log10(seconds / 4))
    step *= max(factor for factor in (1, 2, 5) if factor * step <= seconds / 4)
    parts = []
    for number in range(int(seconds / step * 1.0001) + 1):
        left = LEFT + number * step * scale
        parts.append(f'<path class="tick" d="M{left:.2f} {bottom}v4"/>')
        text = time(number * step)
        parts.append(
            f'<text class="soft" x="{left:.2f}" y="{bottom + 17}" text-anchor="middle">{text}</text>'
        )
    return "".join(parts) + "\n"


def _time(value: float, whole: float, unit: str) -> str:
    """Formats a time in this unit, or else in the one that suits `whole`; both are in seconds then."""
    if unit:
        return f"{value:.4g} {unit}{'s' * (value != 1)}"
    factor, unit = next(((f, u) for f, u in ((1, "s"), (1e3, "ms")) if whole * f >= 1), (1e6, "µs"))
    return f"{value * factor:.4g} {unit}"
