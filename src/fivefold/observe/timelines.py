"""What happens over time, as text and pictures: the timeline of one step of a run, measured on each rank and planned,
that of its pipeline, and what workers of parameter servers do. Files in RUN/traces, also of PyTorch's profiler."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from fivefold.draw.canvas import Line, picture, stacked
from fivefold.draw.lanes import Box, Lane, lanes, strip, time_text
from fivefold.files import MOST_TRACE, make_folder, read_json, understood, write_atomically
from fivefold.observe.format import table
from fivefold.observe.metrics import read_metrics, write_trace
from fivefold.schedules.pipeline import Costs, Schedule, Timeline, simulate
from fivefold.schedules.timelines import COMPUTE, MESSAGE, UPDATE, WAIT, Span, StepTimeline

FILL = {"forward": "F", "backward": "B", "update": "U", "other": "-", WAIT: "."}
LEGEND = "F forward, B backward, U update, - other, . waits; = message beside computing, o message alone"
COLORS = {
    "forward": "blue",
    "backward": "green",
    "update": "purple",
    "other": "grey",
    MESSAGE: "orange",
    WAIT: "red",
}
MOST = 6  # messages of a lane drawn side by side
PARTS = 100  # of a step whose utilisation is drawn


def summary(timeline: StepTimeline) -> str:
    """`0.132 s; messages under way for 0.080 s, 71% of it beside computing; 0.021 s waited`."""
    return (
        f"{time_text(timeline.seconds)}; messages under way for {time_text(timeline.under_way())}, "
        f"{timeline.hidden():.0%} of it beside computing; {time_text(timeline.waited)} waited"
    )


def step_text(timeline: StepTimeline, columns: int = 100, seconds: float | None = None) -> str:
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
        if size := sum(span.bytes for span in messages):
            words += f", {size / 1e6:,.1f} MB"
        if lane == UPDATE:
            words = f"{len(messages)} chunks updated"
        lines.append(f"{lane:{width}} │{''.join(line)}│ {words}")
    return "\n".join(lines) + "\n"


def step_svg(timelines: Sequence[tuple[str, StepTimeline]], title: str = "", width: int = 960) -> str:
    """Timelines with their names, if any, one under the other, on one scale."""
    seconds = max((timeline.seconds for _, timeline in timelines), default=0.0)
    groups = [
        (f"{name}: {summary(timeline)}" if name else "", [_lane(timeline, lane) for lane in _drawn(timeline)])
        for name, timeline in timelines
    ]
    there = {span.kind for _, t in timelines for lane in _drawn(t) for span in _spans(t, lane)}
    legend = [(color, kind) for kind, color in COLORS.items() if kind in there]
    return lanes(title, groups, legend, seconds, partial(time_text, whole=seconds), width)


def _drawn(timeline: StepTimeline) -> list[str]:
    """The lanes; with offload also one of what the rank waits for."""
    first, *others = timeline.lanes
    return [first, *([WAIT] if any(span.bytes for span in timeline.spans) else []), *others]


def _spans(timeline: StepTimeline, lane: str) -> list[Span]:
    return timeline.waits if lane == WAIT else [span for span in timeline.of(lane) if span.kind != WAIT]


def _lane(timeline: StepTimeline, lane: str) -> Lane:
    spans = _spans(timeline, lane)
    if lane == COMPUTE:
        boxes = [
            Box(x.start, x.end, COLORS[x.kind], x.name.rpartition(".")[2], f"{x.name} {x.kind}")
            for x in spans
        ]
        return Lane(lane, [boxes], timeline.seconds)
    # Messages side by side where they overlap; the last row takes what is too much
    rows: list[list[Box]] = []
    for span in spans:
        row = next((row for row in rows if row[-1].end <= span.start), None)
        if row is None and len(rows) < MOST:
            rows.append(row := [])
        box = Box(span.start, span.end, COLORS.get(span.kind, COLORS[MESSAGE]), name=span.name)
        (rows[-1] if row is None else row).append(box)
    words = f"{timeline.hidden(lane):.0%} hidden" if timeline.under_way(lane) else ""  # else: only updates
    if size := sum(span.bytes for span in spans):
        words += f", {size / 1e6:,.1f} MB"
    return Lane(lane, rows, timeline.seconds, words, 8)


def utilisation_svg(timelines: Sequence[tuple[str, StepTimeline]], title: str) -> str:
    """The share of the device that computes over a step, of each timeline a line."""
    lines = []
    for color, (name, timeline) in enumerate(timelines):
        width, shares = timeline.seconds / PARTS, timeline.utilisation(PARTS)
        points = [(at * width, 100 * share) for i, share in enumerate(shares) for at in (i, i + 1)]
        lines.append(Line(f"{name}: {timeline.busy:.0%}", points, color))
    return picture(title, lines, "seconds", "% of the time computing")


PLANNED = "planned"


def write(run: Path, timeline: StepTimeline, planned: bool = False) -> Path:
    """Writes RUN/traces/timeline-step-N-rank-R.json, or ...-planned.json."""
    which = PLANNED if planned else f"rank-{timeline.rank}"
    return write_trace(run, f"timeline-step-{timeline.step:08d}-{which}", timeline.as_json())


def last_step(run: Path) -> str:
    """The digits of the run's last measured step; "": none was measured."""
    return max(map(_step_of, (run / "traces").glob("timeline-step-*.json")), default="")


def _step_of(path: Path) -> str:
    return path.name.split("-")[2]


def read(run: Path) -> list[tuple[str, StepTimeline]]:
    """The timelines of the run's last measured step: ("rank 0, measured", its own), ..., and ("planned", of a rank) if
    there is a plan. Empty if none was measured."""
    measured, planned, last = [], [], last_step(run)
    for path in sorted((run / "traces").glob("timeline-step-*.json")):
        if _step_of(path) != last:
            continue
        with understood(path):
            found = StepTimeline.from_json(read_json(path, MOST_TRACE))
        if path.stem.endswith(PLANNED):
            planned.append((PLANNED, found))
        else:
            measured.append((f"rank {found.rank}, measured", found))
    return sorted(measured, key=lambda one: one[1].rank) + planned


def words(timelines: list[tuple[str, StepTimeline]], columns: int) -> str:
    """All timelines as text, on one scale."""
    seconds = max(timeline.seconds for _, timeline in timelines)
    return "\n".join(
        f"{name}: {summary(timeline)}; device busy {timeline.busy:.0%}\n{step_text(timeline, columns, seconds)}"
        for name, timeline in timelines
    )


def section(run: Path) -> str:
    """The picture for the report's page: the first rank, and the plan; "" if no step was measured."""
    found = read(run)
    if not found:
        return ""
    shown = [found[0], *(one for one in found[1:] if one[0] == PLANNED)]
    picture = step_svg(shown, f"Step {found[0][1].step}: computing and messages")
    rows = [
        (name, f"{t.seconds:.4g} s", f"{t.under_way():.4g} s", f"{t.hidden():.0%}", f"{t.waited:.4g} s")
        for name, t in found
    ]
    return picture + table(("", "Step", "Messages under way", "Beside computing", "Waited"), rows)


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


ACTION_FILL = {"F": "─", "B": "═", "I": "╌", "W": "┄"}
ANSI = {"F": "97;44", "B": "97;42", "I": "97;42", "W": "30;43"}  # ANSI: text and background
ACTIONS = {"F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradients of the weights"}
ACTION_COLORS = {"F": "blue", "B": "green", "I": "green", "W": "orange"}  # colours of pictures


def pipeline_text(timeline: Timeline, columns: int = 100, color: bool = False) -> str:
    """One line per rank: its actions over time, blank while it is idle, and its idle share.

    An action begins with its kind and microbatch, `F3`, or `f3` if the rank also has an earlier stage. If there is no
    room for both, only the kind is shown. `columns`: for the whole makespan. `color`: with ANSI colours.
    """
    digits, lines = len(str(timeline.ranks - 1)), list[str]()
    scale = columns / timeline.makespan if timeline.makespan else 0.0
    for rank, row in enumerate(timeline.rows):
        first_stage = min((event.action.stage for event in row), default=0)
        line, column = "", 0
        for action, *times in row:
            start, end = (round((time - timeline.start) * scale) for time in times)
            label = f"{action.kind}{action.microbatch}"
            if len(label) > end - start:
                label = action.kind
            label = label.lower() if action.stage > first_stage else label
            word = (label + (end - start) * ACTION_FILL[action.kind])[: end - start]
            line += " " * (start - column)
            line += f"\x1b[{ANSI[action.kind]}m{word}\x1b[0m" if color and word else word
            column = end
        line += " " * (columns - column)
        lines.append(f"rank {rank:>{digits}} │{line}│ {timeline.idle_share(rank):6.1%} idle\n")
    return "".join(lines)


def pipeline_svg(
    timeline: Timeline,
    title: str = "",
    width: int = 960,
    seconds: float | None = None,
    unit: str = "",
    shown: Collection[int] | None = None,
) -> str:
    """The timeline as an SVG document, `width` pixels wide. shown: the ranks that are drawn, if not all.

    Each action shows its microbatch if there is room, and its text and times as a tooltip. A rank's later stages are
    paler. `seconds`: the time that the width stands for, if not the makespan, so that several timelines share a scale.
    `unit`: what times count, if not seconds, such as "forward".
    """
    seconds = seconds or timeline.makespan or 1.0

    def time(value: float) -> str:
        return f"{value:.4g} {unit}{'s' * (value != 1)}" if unit else time_text(value, seconds, 4)

    ranks, later = [], False
    for rank, row in enumerate(timeline.rows):
        if shown is not None and rank not in shown:
            continue
        first_stage = min((event.action.stage for event in row), default=0)
        boxes = []
        for action, *times in row:
            start, end = (at - timeline.start for at in times)
            pale = " pale" * (action.stage > first_stage)
            later |= bool(pale)
            boxes.append(
                Box(start, end, ACTION_COLORS[action.kind] + pale, str(action.microbatch), str(action))
            )
        words = f"{timeline.idle_share(rank):.1%} idle"
        ranks.append(Lane(f"rank {rank}", [boxes], timeline.makespan, words))
    there = {event.action.kind for event in timeline.events()}
    legend = [(ACTION_COLORS[kind], f"{kind} {name}") for kind, name in ACTIONS.items() if kind in there]
    about = f"{timeline.ranks} ranks, {time(timeline.makespan)}, {timeline.bubble:.1%} idle"
    note = "paler: a rank's later stages" * later
    return lanes(title, [("", ranks)], legend, seconds, time, width, note, about)


def write_pipeline_trace(folder: Path, step: int, schedule: Schedule, measured: Timeline) -> Path:
    """Writes pipeline-step-N.svg, and its times as .json (seconds since the step began). Returns the picture's path.

    The simulator gives the plan, with the median duration of each kind of action at each stage and no time for
    transfers. The measured timeline takes longer where ranks wait.
    """
    make_folder(folder)
    durations: dict[tuple[str, int], list[float]] = defaultdict(list)
    for action, start, end in measured.events():
        durations[action.kind, action.stage].append(end - start)
    forward, backward, inputs, weights = (
        [median(durations.get((kind, stage), [0.0])) for stage in range(schedule.stages)] for kind in "FBIW"
    )
    planned = simulate(schedule, Costs(forward=forward, backward=backward, input=inputs, weight=weights))
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


WORKERS = "workers.jsonl"
"""A file of the run folder: a line per share, with who computed it when."""
WORKER_STEPS = 12  # of a run that are drawn: the last ones
WORKER_LETTERS = {"a": "A", "b": "B", "wait": ".", "push": ">", "pull": "<"}
WORKER_COLORS = {"a": "blue", "b": "green", "wait": "orange half", "push": "orange", "pull": "purple"}
"""Of the kinds of boxes: two that alternate, waits, messages to and from servers."""
EVENTS = {
    "forward": ("computing", "a"), "backward": ("computing", "b"), "push": ("pushes", "push"), "pull": ("pulls", "pull")
}  # fmt: skip
"""Row and kind of what a worker does."""
Rows = Mapping[str, Sequence[Box]]


def worker_shares(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[Box]]:
    """The rows of a run's workers.jsonl: a box per share with the number of its step, paler while the worker waited for
    weights."""
    ordered = sorted(lines, key=lambda line: line["begin"])
    origin = ordered[0]["begin"] if ordered else 0.0
    found: dict[str, list[Box]] = {}
    for line in sorted(ordered, key=lambda line: line["worker"]):
        start, end = line["begin"] - origin, line["end"] - origin
        computes = min(end, start + line["waited_s"])
        row = found.setdefault(f"worker {line['worker']}", [])
        if computes - start > 0.002:
            row.append(Box(start, computes, "wait"))
        row.append(Box(computes, end, "ab"[line["step"] % 2], str(line["step"])))
    return found


def read_workers(run: Path) -> dict[str, list[Box]]:
    """The rows of the last steps of a run. Empty without RUN/workers.jsonl. Raises UserError: it is damaged."""
    path = run / WORKERS
    lines = read_metrics(path) if path.is_file() else []
    last = max((line["step"] for line in lines), default=0)
    with understood(path):
        return worker_shares(line for line in lines if line["step"] > last - WORKER_STEPS)


def rows_of(
    events: Iterable[tuple[str, int, float, float]], origin: float, end: float
) -> dict[str, list[Box]]:
    """What is computed, pushed and pulled, of events (what, unit, start, end) that begin from `origin` to `end`.

    Parts that are under way together share the wire: each is drawn from the end of the one before. Parts of a unit that
    follow each other are one box.
    """
    rows: dict[str, list[Box]] = {row: [] for row, _ in EVENTS.values()}
    for what, unit, start, stop in sorted(events, key=lambda event: min(event[3], end)):
        if not origin <= start < end:
            continue
        row, kind = EVENTS[what]
        boxes, label, stop = rows[row], str(unit), min(stop, end) - origin
        last = boxes[-1] if boxes else Box(0.0, 0.0, "")
        start = max(start - origin, last.end)
        if kind in ("push", "pull") and (last.kind, last.label) == (kind, label) and start <= last.end + 1e-3:
            boxes[-1] = last._replace(end=stop)
        else:
            boxes.append(Box(start, stop, kind, label))
    return rows


def end_of(rows: Rows) -> float:
    """When the last box ends."""
    return max((box.end for row in rows.values() for box in row), default=0.0)


def workers_text(rows: Rows, columns: int = 100, seconds: float | None = None) -> str:
    """A line for each row in the letters of `WORKER_LETTERS`. seconds: the time that `columns` stand for."""
    lines, wide = list[str](), max(map(len, rows), default=0)
    for name, row in rows.items():
        letters = strip(
            ((box.start, box.end, WORKER_LETTERS[box.kind]) for box in row), columns, seconds or end_of(rows)
        )
        lines.append(f"{name:{wide}} │{''.join(letters)}│")
    return "\n".join(lines) + "\n"


def waited(rows: Rows) -> str:
    """`worker 0: 6 shares, waits 12%`, for each worker: the share of the time in which it computes nothing."""
    end, found = end_of(rows), list[str]()
    for name, row in rows.items():
        computes = [box.end - box.start for box in row if box.kind != "wait"]
        found.append(f"{name}: {len(computes)} shares, waits {1 - sum(computes) / (end or 1):.0%}")
    return "; ".join(found)


def workers_svg(pictures: Mapping[str, Rows], title: str, width: int = 920) -> str:
    """Several pictures one under the other, by their titles, on one scale of time."""
    groups = []
    for name, rows in pictures.items():
        last = end_of(rows)
        words = [f"{last:.3g} s"] + [""] * len(rows)  # beside the first row
        drawn = [
            Lane(row, [[box._replace(kind=WORKER_COLORS[box.kind]) for box in boxes]], last, after)
            for (row, boxes), after in zip(rows.items(), words, strict=False)
        ]
        groups.append((name, drawn))
    seconds = max(map(end_of, pictures.values()), default=0.0)
    return lanes(title, groups, (), seconds, "{:.3g} s".format, width)
