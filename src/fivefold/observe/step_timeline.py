"""The timeline of one step of a run, measured on each rank and planned, that of its pipeline, and what the profiler of
PyTorch recorded: files in RUN/traces, text, pictures, a table of operators."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from fivefold.draw.canvas import stacked
from fivefold.draw.lanes import Box, Lane, lanes, strip, time_text
from fivefold.files import MOST_TRACE, make_folder, read_json, understood, write_atomically
from fivefold.observe.document import table
from fivefold.observe.metrics import write_trace
from fivefold.schedules.overlap import COMPUTE, MESSAGE, WAIT, Span, StepTimeline, from_json
from fivefold.schedules.pipeline import Costs, Schedule, Timeline, simulate
from fivefold.schedules.pipeline import to_svg as pipeline_svg

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


PLANNED = "planned"


def write(run: Path, timeline: StepTimeline, planned: bool = False) -> Path:
    """Writes RUN/traces/timeline-step-N-rank-R.json, or ...-planned.json."""
    which = PLANNED if planned else f"rank-{timeline.rank}"
    return write_trace(run, f"timeline-step-{timeline.step:08d}-{which}", timeline.as_json())


def read(run: Path) -> list[tuple[str, StepTimeline]]:
    """The timelines of the run's last measured step: ("rank 0", measured), ..., and ("planned", of a rank) if there is
    a plan. Empty if none was measured."""
    paths = sorted((run / "traces").glob("timeline-step-*.json"))
    paths = [path for path in paths if path.name.split("-")[2] == paths[-1].name.split("-")[2]]
    measured, planned = [], []
    for path in paths:
        with understood(path):
            found = from_json(read_json(path, MOST_TRACE))
        if path.stem.endswith(PLANNED):
            planned.append((PLANNED, found))
        else:
            measured.append((f"rank {found.rank}", found))
    return sorted(measured, key=lambda one: one[1].rank) + planned


def words(timelines: list[tuple[str, StepTimeline]], columns: int) -> str:
    """All timelines as text, on one scale."""
    seconds = max(timeline.seconds for _, timeline in timelines)
    return "\n".join(
        f"{name}: {summary(timeline)}\n{to_text(timeline, columns, seconds)}" for name, timeline in timelines
    )


def section(run: Path) -> str:
    """The picture for the report's page: the first rank, and the plan; "" if no step was measured."""
    found = read(run)
    if not found:
        return ""
    shown = [found[0], *(one for one in found[1:] if one[0] == PLANNED)]
    picture = to_svg(shown, f"Step {found[0][1].step}: computing and messages")
    rows = [
        (name, f"{t.seconds:.4g} s", f"{t.under_way():.4g} s", f"{t.hidden():.0%}", f"{t.waited:.4g} s")
        for name, t in found
    ]
    return picture + table(("", "Step", "Messages under way", "Beside computing", "Waited"), rows)


def write_pipeline_trace(folder: Path, step: int, schedule: Schedule, measured: Timeline) -> Path:
    """Writes pipeline-step-N.svg, and its times as .json (seconds since the step began). Returns the picture's path.

    The simulator gives the plan, with the median duration of each kind of action at each stage and no time for
    transfers. The measured timeline takes longer where ranks wait.
    """
    make_folder(folder)
    planned = simulate(schedule, costs(schedule, measured))
    path = folder / f"pipeline-step-{step:08d}.svg"
    both = {"planned": planned, "measured": measured}
    seconds = max(timeline.makespan for timeline in both.values())  # they share a scale
    title = f"{schedule.name}, step {step}"
    pictures = (
        pipeline_svg(timeline, f"{title}: {name}", seconds=seconds) for name, timeline in both.items()
    )
    write_atomically(path, stacked(pictures))
    facts = {"step": step, "schedule": schedule.name, "microbatches": schedule.microbatches}
    for name, timeline in both.items():
        rows = [[[str(action), start, end] for action, start, end in row] for row in timeline.rows]
        facts[name] = {"makespan_s": timeline.makespan, "idle_share": timeline.bubble, "rows": rows}
    write_atomically(path.with_suffix(".json"), json.dumps(facts) + "\n")
    return path


def costs(schedule: Schedule, measured: Timeline) -> Costs:
    """The median duration in seconds of each kind of action at each stage, 0 for missing kinds."""
    durations: dict[tuple[str, int], list[float]] = defaultdict(list)
    for action, start, end in measured.events():
        durations[action.kind, action.stage].append(end - start)
    of = {
        kind: [median(durations.get((kind, stage), [0.0])) for stage in range(schedule.stages)]
        for kind in "FBIW"
    }
    return Costs(forward=of["F"], backward=of["B"], input=of["I"], weight=of["W"])


LONGEST = 10
"""Operators in the table."""
_TABLE = re.compile(r"profile-step-(\d{8,})-(\d{8,})\.json", re.ASCII)


class Operator(NamedTuple):
    """Calls and seconds of an operator, without those that it calls. share: of all operators' seconds."""

    name: str
    calls: int
    seconds: float
    share: float = 0.0


def _stem(first: int, last: int) -> str:
    return f"profile-step-{first:08d}-{last:08d}"


def trace_name(first: int, last: int, rank: int) -> str:
    """The file with a rank's trace of these steps."""
    return f"{_stem(first, last)}-rank-{rank}.json.gz"


def write_operators(run: Path, first: int, last: int, longest: Sequence[Operator]) -> None:
    """Writes RUN/traces/profile-step-FIRST-LAST.json."""
    rows = [operator._asdict() for operator in longest]
    write_trace(run, _stem(first, last), {"steps": [first, last], "operators": rows})


def operators_section(run: Path) -> str:
    """The last profile, for the report's page; "" if there is none."""
    tables = sorted(
        path for path in (run / "traces").glob("profile-step-*.json") if _TABLE.fullmatch(path.name)
    )
    if not tables:
        return ""
    with understood(tables[-1]):
        facts = read_json(tables[-1])
        first, last = map(int, facts["steps"])
        operators = [Operator(str(o["name"]), int(o["calls"]), float(o["seconds"]), float(o["share"]))
                     for o in facts["operators"]]  # fmt: skip
    ranks = len(list((run / "traces").glob(f"{_stem(first, last)}-rank-*.json.gz")))
    rows = [
        (o.name, f"{o.calls:,}", f"{1e3 * o.seconds:,.1f} ms", f"{o.share:.1%}") for o in operators[:LONGEST]
    ]
    steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
    return (
        f"<p>PyTorch's profiler recorded {steps} on {ranks:,} rank{'s' * (ranks != 1)}. Open a file "
        f"<code>traces/{_stem(first, last)}-rank-N.json.gz</code> at ui.perfetto.dev, which reads it in the browser "
        "and sends it nowhere, or at chrome://tracing. The operators of rank 0 that took longest, without what they "
        f"call:</p>{table(('Operator', 'Calls', 'Time', 'Share'), rows)}"
    )
