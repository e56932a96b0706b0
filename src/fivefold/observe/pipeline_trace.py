"""Draws one step of a pipeline, measured and planned, in one picture."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import median

from fivefold.draw.canvas import stacked
from fivefold.files import make_folder, write_atomically
from fivefold.schedules.pipeline import Costs, Schedule, Timeline, simulate, to_svg


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
    pictures = (to_svg(timeline, f"{title}: {name}", seconds=seconds) for name, timeline in both.items())
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
