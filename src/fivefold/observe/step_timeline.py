"""The timeline of one step of a run, measured on each rank and planned: files in RUN/traces, text, picture."""

from __future__ import annotations

import json
from pathlib import Path

from fivefold.files import MOST_TRACE, make_folder, read_json, understood, write_atomically
from fivefold.schedules.overlap import StepTimeline, from_json
from fivefold.schedules.overlap_draw import summary, to_svg, to_text

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
    rows = "".join(
        f'<tr><th scope="row">{name}</th><td>{t.seconds:.4g} s</td><td>{t.under_way():.4g} s</td>'
        f"<td>{t.hidden():.0%}</td><td>{t.waited:.4g} s</td></tr>\n"
        for name, t in found
    )
    head = "".join(
        f'<th scope="col">{name}</th>'
        for name in ("", "Step", "Messages under way", "Beside computing", "Waited")
    )
    return f"{picture}<table><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table>"
