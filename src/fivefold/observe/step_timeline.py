"""The timeline of one step of a run, measured on each rank and planned, that of its pipeline, and what the profiler of
PyTorch recorded: files in RUN/traces, text, pictures, a table of operators."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from fivefold.draw.canvas import stacked
from fivefold.files import MOST_TRACE, make_folder, read_json, understood, write_atomically
from fivefold.observe.document import table
from fivefold.schedules.overlap import StepTimeline, from_json
from fivefold.schedules.overlap_draw import summary, to_svg, to_text
from fivefold.schedules.pipeline import Costs, Schedule, Timeline, simulate
from fivefold.schedules.pipeline import to_svg as pipeline_svg

PLANNED = "planned"


def write(run: Path, timeline: StepTimeline, planned: bool = False) -> Path:
    """Writes RUN/traces/timeline-step-N-rank-R.json, or ...-planned.json."""
    folder = run / "traces"
    make_folder(folder)
    which = PLANNED if planned else f"rank-{timeline.rank}"
    path = folder / f"timeline-step-{timeline.step:08d}-{which}.json"
    write_atomically(path, json.dumps(timeline.as_json()) + "\n")
    return path


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
    folder = run / "traces"
    make_folder(folder)
    rows = [one._asdict() for one in longest]
    write_atomically(
        folder / f"{_stem(first, last)}.json", json.dumps({"steps": [first, last], "operators": rows}) + "\n"
    )


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
