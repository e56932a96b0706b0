"""A timeline as text, for terminals."""

from __future__ import annotations

from fivefold.schedules.pipeline.action import Action
from fivefold.schedules.pipeline.timeline import Timeline

FILL = {"F": "─", "B": "═", "I": "╌", "W": "┄"}
COLOR = {"F": "97;44", "B": "97;42", "I": "97;42", "W": "30;43"}  # ANSI: text and background


def to_text(timeline: Timeline, columns: int = 100, color: bool = False) -> str:
    """One line a rank: its actions over time, blank where it is idle, and its idle share.

    An action begins with its kind and microbatch, `F3`, or `f3` if the rank has an earlier stage too; where there
    is no room for both, with its kind. `columns`: for the whole makespan. `color`: with ANSI colours.
    """
    width = len(str(timeline.ranks - 1))
    lines = [
        f"rank {rank:>{width}} │{_row(timeline, rank, columns, color)}│ {timeline.idle_share(rank):6.1%} idle"
        for rank in range(timeline.ranks)
    ]
    return "\n".join(lines) + "\n"


def _row(timeline: Timeline, rank: int, columns: int, color: bool) -> str:
    scale = columns / timeline.makespan if timeline.makespan else 0.0
    first_stage = min((event.action.stage for event in timeline.rows[rank]), default=0)
    line, here = "", 0
    for action, *times in timeline.rows[rank]:
        start, end = (round((time - timeline.start) * scale) for time in times)
        line += " " * (start - here) + _cell(action, end - start, action.stage > first_stage, color)
        here = end
    return line + " " * (columns - here)


def _cell(action: Action, width: int, later: bool, color: bool) -> str:
    """The action in `width` characters; `later`: it is of a later stage of the rank."""
    label = f"{action.kind}{action.microbatch}"
    if len(label) > width:
        label = action.kind
    cell = ((label.lower() if later else label) + width * FILL[action.kind])[:width]
    return f"\x1b[{COLOR[action.kind]}m{cell}\x1b[0m" if color and cell else cell
