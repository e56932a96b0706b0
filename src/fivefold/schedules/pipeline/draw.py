"""Draws a timeline as text for terminals, and as a standalone SVG for light and dark themes."""

from __future__ import annotations

from functools import partial

from fivefold.draw.lanes import Box, Lane, lanes, time_text
from fivefold.schedules.pipeline.schedule import Action
from fivefold.schedules.pipeline.simulate import Timeline

FILL = {"F": "─", "B": "═", "I": "╌", "W": "┄"}
COLOR = {"F": "97;44", "B": "97;42", "I": "97;42", "W": "30;43"}  # ANSI: text and background
NAMES = {"F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradients of the weights"}
KINDS = {"F": "blue", "B": "green", "I": "green", "W": "orange"}  # colours of pictures


def to_text(timeline: Timeline, columns: int = 100, color: bool = False) -> str:
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


def _line(timeline: Timeline, rank: int, columns: int, color: bool) -> str:
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
    timeline: Timeline,
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
    time = partial(_time, whole=seconds, unit=unit)
    ranks, later = [], False
    for rank, row in enumerate(timeline.rows):
        first_stage = min((event.action.stage for event in row), default=0)
        boxes = []
        for action, *times in row:
            start, end = (at - timeline.start for at in times)
            pale = " pale" * (action.stage > first_stage)
            later |= bool(pale)
            boxes.append(Box(start, end, KINDS[action.kind] + pale, str(action.microbatch), str(action)))
        words = f"{timeline.idle_share(rank):.1%} idle"
        ranks.append(Lane(f"rank {rank}", [boxes], timeline.makespan, words))
    there = {event.action.kind for event in timeline.events()}
    legend = [(KINDS[kind], f"{kind} {name}") for kind, name in NAMES.items() if kind in there]
    about = f"{timeline.ranks} ranks, {time(timeline.makespan)}, {timeline.bubble:.1%} idle"
    note = "paler: a rank's later stages" * later
    return lanes(title, [("", ranks)], legend, seconds, time, width, note, about)


def _time(value: float, whole: float, unit: str) -> str:
    """A time that counts this unit, or else in seconds, in the unit that suits `whole`."""
    return f"{value:.4g} {unit}{'s' * (value != 1)}" if unit else time_text(value, whole, 4)
