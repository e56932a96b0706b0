"""Draws the timeline of a step, computing and messages, as text for terminals and as SVG for light and dark themes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fivefold.schedules.overlap import COMPUTE, KINDS, WAIT, Span, StepTimeline

FILL = {"forward": "F", "backward": "B", "update": "U", "other": "-", WAIT: "."}
NAMES = {"forward": "forward", "backward": "backward", "update": "update", "other": "other", WAIT: "waits"}
NAMES["message"] = "message"
LEGEND = "F forward, B backward, U update, - other, . waits; = message beside computing, o message alone"
LEFT, RIGHT, TOP, ROW, THIN, GAP = (
    74,
    92,
    58,
    26,
    8,
    7,
)  # pixels: margins, height of computing, of a message, space
MOST = 6  # messages of a lane drawn side by side
STYLE = """
.overlap { color-scheme: light dark; font: 12px system-ui, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif;
  --paper: #fdfcf9; --ink: #22211f; --soft: #66625b; --rule: #d8d3c8; --idle: #f0ede5; --on: #ffffff;
  --forward: #1d5b9c; --backward: #2c7a5b; --update: #7b4fa3; --other: #8b857a; --message: #b5651d; }
@media (prefers-color-scheme: dark) { .overlap { --paper: #171614; --ink: #e9e6df; --soft: #a49f95; --rule: #45423b;
  --idle: #24221f; --on: #171614; --forward: #7fb2ea; --backward: #79c9a3; --update: #c3a1e0; --other: #8d877d;
  --message: #f0b06a; } }
.overlap .paper { fill: var(--paper); } .overlap text { fill: var(--ink); font-variant-numeric: tabular-nums; }
.overlap .soft { fill: var(--soft); } .overlap .title { font-size: 15px; font-weight: 600; }
.overlap .idle, .overlap .wait { fill: var(--idle); } .overlap .tick { stroke: var(--rule); }
.overlap .forward { fill: var(--forward); } .overlap .backward { fill: var(--backward); }
.overlap .update { fill: var(--update); } .overlap .other { fill: var(--other); }
.overlap .message { fill: var(--message); }
.overlap .label { fill: var(--on); font-size: 11px; text-anchor: middle; }
"""


def summary(timeline: StepTimeline) -> str:
    """`0.132 s; messages under way for 0.080 s, 71% of it beside computing; 0.021 s waited`."""
    return (
        f"{_time(timeline.seconds)}; messages under way for {_time(timeline.under_way())}, "
        f"{timeline.hidden():.0%} of it beside computing; {_time(timeline.waited)} waited"
    )


def to_text(timeline: StepTimeline, columns: int = 100, seconds: float | None = None) -> str:
    """A line for what the rank computes, and a line for the messages of each axis, in the letters of `LEGEND`. seconds:
    the time that `columns` stand for."""
    scale = columns / (seconds or timeline.seconds or 1.0)
    computed = [" "] * columns
    for span in timeline.of(COMPUTE):
        for column in _columns(span, scale, columns):
            computed[column] = FILL[span.kind]
    width = max(map(len, timeline.lanes))
    lines = [f"{COMPUTE:{width}} │{''.join(computed)}│"]
    for lane in timeline.lanes[1:]:
        messages, line = timeline.of(lane), [" "] * columns
        for span in messages:
            for column in _columns(span, scale, columns):
                line[column] = "o" if computed[column] in (FILL[WAIT], " ") else "="
        words = (
            f"{len(messages)} messages, {_time(timeline.under_way(lane))}, {timeline.hidden(lane):.0%} hidden"
        )
        lines.append(f"{lane:{width}} │{''.join(line)}│ {words}")
    return "\n".join(lines) + "\n"


def _columns(span: Span, scale: float, columns: int) -> range:
    first = min(columns - 1, int(span.start * scale))
    return range(first, min(columns, max(first + 1, round(span.end * scale))))


def to_svg(timelines: Sequence[tuple[str, StepTimeline]], title: str = "", width: int = 960) -> str:
    """Timelines with their names, one under the other, on one scale."""
    seconds = max((timeline.seconds for _, timeline in timelines), default=0.0) or 1.0
    scale, top, parts = (width - LEFT - RIGHT) / seconds, TOP, []
    for name, timeline in timelines:
        words = escape(f"{name}: {summary(timeline)}")
        parts.append(f'<text x="{LEFT}" y="{top + 10}">{words}</text>\n')
        drawn, top = _timeline(timeline, top + 20, scale)
        parts.append(drawn)
        top += 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="overlap" role="img" width="{width}" height="{top + 20}" '
        f'viewBox="0 0 {width} {top + 20}">\n<title>{escape(title)}</title><style>{STYLE}</style>\n'
        f'<rect class="paper" width="100%" height="100%"/>\n'
        f'<text class="title" x="{LEFT}" y="22">{escape(title)}</text>'
        f"{_legend(timelines)}{''.join(parts)}{_axis(seconds, scale, top)}</svg>\n"
    )


def _timeline(timeline: StepTimeline, top: int, scale: float) -> tuple[str, int]:
    """(one timeline, its lower end)."""
    parts, end = [], timeline.seconds * scale
    for lane in timeline.lanes:
        spans = timeline.of(lane)
        rows = [spans] if lane == COMPUTE else _side_by_side(spans)
        row = ROW if lane == COMPUTE else THIN
        high, middle = row * len(rows), top + row * len(rows) / 2 + 4
        cells = "".join(
            _cell(span, top + number * row, row, scale) for number, some in enumerate(rows) for span in some
        )
        parts.append(
            f'<text class="soft" x="{LEFT - 10}" y="{middle}" text-anchor="end">{escape(lane)}</text>'
            f'<rect class="idle" x="{LEFT}" y="{top}" width="{end:.2f}" height="{high}"/>{cells}'
        )
        if timeline.under_way(lane):  # the host's lane may have updates only
            words = f"{timeline.hidden(lane):.0%} hidden"
            parts.append(f'<text class="soft" x="{LEFT + end + 8:.2f}" y="{middle}">{words}</text>\n')
        top += high + GAP
    return "".join(parts), top


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


def _cell(span: Span, top: int, high: int, scale: float) -> str:
    if span.kind == WAIT:
        return ""
    left, wide = LEFT + span.start * scale, span.seconds * scale
    label, text = span.name.rpartition(".")[2] if span.lane == COMPUTE else "", ""
    if label and wide >= 6 + 6.5 * len(label):
        text = (
            f'<text class="label" x="{left + wide / 2:.2f}" y="{top + high / 2 + 4}">{escape(label)}</text>'
        )
    times = f"{_time(span.start)} to {_time(span.end)}"
    what = f"{span.name} {span.kind}" if span.lane == COMPUTE else span.name
    gap = 0.6 if wide > 2 else 0.0
    return (
        f'<g><title>{escape(what)}: {times}</title><rect class="{span.kind}" x="{left:.2f}" y="{top}" '
        f'width="{max(0.3, wide - gap):.2f}" height="{high - (span.lane != COMPUTE)}"/>{text}</g>'
    )


def _legend(timelines: Sequence[tuple[str, StepTimeline]]) -> str:
    there = {span.kind for _, timeline in timelines for span in timeline.spans} - {WAIT}
    left, parts = LEFT, []
    for kind in (*KINDS, "message"):
        if kind in there:
            parts.append(f'<rect class="{kind}" x="{left}" y="33" width="12" height="12"/>')
            parts.append(f'<text class="soft" x="{left + 18}" y="43">{NAMES[kind]}</text>')
            left += 40 + 6.5 * len(NAMES[kind])
    return "".join(parts) + "\n"


def _axis(seconds: float, scale: float, top: int) -> str:
    parts = []
    for number in range(6):
        x = LEFT + seconds * number / 5 * scale
        parts.append(f'<path class="tick" d="M{x:.1f} {top - 4}V{top}"/>')
        parts.append(
            f'<text class="soft" x="{x:.1f}" y="{top + 14}" text-anchor="middle">{_time(seconds * number / 5)}</text>'
        )
    return "".join(parts)


def _time(seconds: float) -> str:
    """Seconds with a unit, three digits."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= unit or unit == 1e-6:
            return f"{seconds / unit:.3g} {name}" if seconds else "0"
    raise AssertionError
