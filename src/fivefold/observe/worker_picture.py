"""Draws runs with parameter servers as text and SVG: who computes when, and what a worker sends while it computes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fivefold.draw.lanes import Box, Lane, lanes, strip
from fivefold.files import understood
from fivefold.observe.metrics import read_metrics
from fivefold.schedules.priority import Simulation

WORKERS = "workers.jsonl"
"""A file of the run folder: a line per share, with who computed it when."""
STEPS = 12  # of a run that are drawn: the last ones
LETTERS = {"a": "A", "b": "B", "wait": ".", "push": ">", "pull": "<"}
COLORS = {"a": "blue", "b": "green", "wait": "orange half", "push": "orange", "pull": "purple"}
"""Of the kinds of boxes: two that alternate, waits, messages to and from servers."""
EVENTS = {
    "forward": ("computing", "a"), "backward": ("computing", "b"), "push": ("pushes", "push"), "pull": ("pulls", "pull")
}  # fmt: skip
"""Row and kind of what a worker does."""
Rows = Mapping[str, Sequence[Box]]


def shares(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[Box]]:
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


def read(run: Path) -> dict[str, list[Box]]:
    """The rows of the last steps of a run. Empty without RUN/workers.jsonl.

    Raises:
        UserError: it is damaged.
    """
    path = run / WORKERS
    lines = read_metrics(path) if path.is_file() else []
    last = max((line["step"] for line in lines), default=0)
    with understood(path):
        return shares(line for line in lines if line["step"] > last - STEPS)


def simulated(run: Simulation, steps: int = 2) -> dict[str, list[Box]]:
    """The rows of a simulated worker, from the backward that ends before its last steps to that of the last one."""
    return _rows(run.events, run.ends[-steps - 1], run.ends[-1])


def exchange(trace: Iterable[Sequence[Any]], steps: int = 2) -> dict[str, list[Box]]:
    """The rows of a worker's trace (parallel/worker.py): forward and backward of each unit, pushes and pulls, in the
    last steps."""
    events, last = list[tuple[str, int, float, float]](), ("", 0, 0.0)
    for what, unit, start, end in sorted(trace, key=lambda event: event[3]):
        if what in ("push", "pull"):
            events.append((what, unit, start, end))
            continue
        if what in ("need", "loss") and last[0] == "need":
            events.append(("forward", last[1], last[2], start))
        if what == "ready" and last[0]:
            events.append(("backward", unit, last[2], end))
        last = what, unit, end
    ends = [end for what, unit, _, end in events if what == "backward" and unit == 0]
    return _rows(events, ends[-steps - 1] if len(ends) > steps else 0.0, math.inf)


def _rows(events: Iterable[tuple[str, int, float, float]], origin: float, end: float) -> dict[str, list[Box]]:
    """What is computed, pushed and pulled, of events (what, unit, start, end) that begin from `origin` to `end`."""
    rows: dict[str, list[Box]] = {row: [] for row, _ in EVENTS.values()}
    for what, unit, start, stop in events:
        if origin <= start < end:
            row, kind = EVENTS[what]
            rows[row].append(Box(start - origin, min(stop, end) - origin, kind, str(unit)))
    return rows


def one_at_a_time(rows: Rows) -> dict[str, list[Box]]:
    """Parts that are under way together share the wire: each is drawn from the end of the one before. Parts of a unit
    that follow each other are one box."""
    found: dict[str, list[Box]] = {}
    for name, row in rows.items():
        free, boxes = 0.0, list[Box]()
        for box in sorted(row, key=lambda box: box.end):
            start, free = max(box.start, free), box.end
            last = boxes[-1] if boxes else None
            if last and last[2:] == box[2:] and box.kind in ("push", "pull") and start <= last.end + 1e-3:
                boxes[-1] = last._replace(end=box.end)
            else:
                boxes.append(box._replace(start=start))
        found[name] = boxes
    return found


def end_of(rows: Rows) -> float:
    """When the last box ends."""
    return max((box.end for row in rows.values() for box in row), default=0.0)


def to_text(rows: Rows, columns: int = 100, seconds: float | None = None) -> str:
    """A line for each row in the letters of `LETTERS`. seconds: the time that `columns` stand for."""
    lines, wide = list[str](), max(map(len, rows), default=0)
    for name, row in rows.items():
        letters = strip(
            ((box.start, box.end, LETTERS[box.kind]) for box in row), columns, seconds or end_of(rows)
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


def to_svg(pictures: Mapping[str, Rows], title: str, width: int = 920) -> str:
    """Several pictures one under the other, by their titles, on one scale of time."""
    groups = []
    for name, rows in pictures.items():
        last = end_of(rows)
        words = [f"{last:.3g} s"] + [""] * len(rows)  # beside the first row
        drawn = [
            Lane(row, [[box._replace(kind=COLORS[box.kind]) for box in boxes]], last, after)
            for (row, boxes), after in zip(rows.items(), words, strict=False)
        ]
        groups.append((name, drawn))
    seconds = max(map(end_of, pictures.values()), default=0.0)
    return lanes(title, groups, (), seconds, "{:.3g} s".format, width)
