"""Draws the timeline of a step, computing and messages, as text for terminals and as SVG for light and dark themes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fivefold.draw.lanes import Box, Lane, lanes, strip, time_text
from fivefold.schedules.overlap import COMPUTE, MESSAGE, WAIT, Span, StepTimeline

FILL = {"forward": "F", "backward": "B", "update": "U", "other": "-", WAIT: "."}
LEGEND = "F forward, B backward, U update, - other, . waits; = message beside computing, o message alone"
COLORS = {
    "forward": "blue", "backward": "green", "update": "purple", "other": "grey", MESSAGE: "orange"
}  # fmt: skip
MOST = 6  # messages of a lane drawn side by side


def summary(timeline: StepTimeline) -> str:
    """`0.132 s; messages under way for 0.080 s, 71% of it beside computing; 0.021 s waited`."""
    return (
        f"{time_text(timeline.seconds)}; messages under way for {time_text(timeline.under_way())}, "
        f"{timeline.hidden():.0%} of it beside computing; {time_text(timeline.waited)} waited"
    )


def to_text(timeline: StepTimeline, columns: int = 100, seconds: float | None = None) -> str:
    """A line for what the rank computes, and a line for the messages of each axis, in the letters of `LEGEND`. seconds:
    the time that `columns` stand for."""
    seconds = seconds or timeline.seconds
    computed = strip(((x.start, x.end, FILL[x.kind]) for x in timeline.of(COMPUTE)), columns, seconds)
    width = max(map(len, timeline.lanes))
    lines = [f"{COMPUTE:{width}} │{''.join(computed)}│"]
    for lane in timeline.lanes[1:]:
        messages = timeline.of(lane)
        sent = strip(((span.start, span.end, "=") for span in messages), columns, seconds)
        alone = (FILL[WAIT], " ")
        line = ("o" if x == "=" and beside in alone else x for x, beside in zip(sent, computed, strict=True))
        words = f"{len(messages)} messages, {time_text(timeline.under_way(lane))}, {timeline.hidden(lane):.0%} hidden"
        lines.append(f"{lane:{width}} │{''.join(line)}│ {words}")
    return "\n".join(lines) + "\n"


def to_svg(timelines: Sequence[tuple[str, StepTimeline]], title: str = "", width: int = 960) -> str:
    """Timelines with their names, one under the other, on one scale."""
    seconds = max((timeline.seconds for _, timeline in timelines), default=0.0)
    groups = [
        (f"{name}: {summary(timeline)}", [_lane(timeline, lane) for lane in timeline.lanes])
        for name, timeline in timelines
    ]
    there = {span.kind for _, timeline in timelines for span in timeline.spans} - {WAIT}
    legend = [(color, kind) for kind, color in COLORS.items() if kind in there]
    return lanes(title, groups, legend, seconds, partial(time_text, whole=seconds), width)


def _lane(timeline: StepTimeline, lane: str) -> Lane:
    computing, spans = lane == COMPUTE, timeline.of(lane)
    hidden = f"{timeline.hidden(lane):.0%} hidden" if timeline.under_way(lane) else ""  # else: only updates
    rows = [spans] if computing else _side_by_side(spans)
    boxes = [[_box(span) for span in row if span.kind != WAIT] for row in rows]
    return Lane(lane, boxes, timeline.seconds, hidden, 26 if computing else 8)


def _box(span: Span) -> Box:
    if span.lane != COMPUTE:
        return Box(span.start, span.end, COLORS[MESSAGE], name=span.name)
    label, name = span.name.rpartition(".")[2], f"{span.name} {span.kind}"
    return Box(span.start, span.end, COLORS[span.kind], label, name)


def _side_by_side(spans: Sequence[Span]) -> list[list[Span]]:
    """Rows of messages that do not overlap. The last row takes what is too much."""
    rows: list[list[Span]] = []
    for span in spans:
        free = (row for row in rows if row[-1].end <= span.start)
        row = next(free, None)
        if row is None and len(rows) < MOST:
            rows.append(row := [])
        (rows[-1] if row is None else row).append(span)
    return rows
