"""What went wrong in a run. Steps: their names in metrics.jsonl, in words, and as a section of the report. Restarts:
RUN/restarts.jsonl, a line for each time that the ranks were started again, and why."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fivefold.files import MOST_JSON, Lines, read_bytes
from fivefold.observe.document import table
from fivefold.observe.metrics import json_object

KINDS = {
    "destroyed": "update(s) that destroyed weights",
    "nonfinite": "not finite",
    "spike": "spike(s) of the loss",
    "outlier": "outlier(s) of the gradient's norm",
    "overflow": "overflow(s) in fp16",
}
"""Figures of a step that are 1 where the update before it has destroyed weights; where loss or gradient are not finite;
where the loss, or the gradient's norm, is far above the usual one; where the gradient overflowed, which a lower factor
of the loss may cure."""
GROWTH = 1e4
"""How far the largest weight may grow in one step."""
USUAL = ("usual_loss", "usual_norm")
"""Figures of a step: the running means of loss and norm."""
ROLLBACK = "rollback"
"""A figure of the step that a run went back to: {"from": the step of the fault, "why": in words}."""
SHOWN = 50


def described(kind: str, figures: Mapping[str, Any]) -> str:
    """A fault of a step in words. figures: those of the step."""
    if kind == "destroyed":
        return (
            f"the update of step {figures['step'] - 1} has destroyed weights: they are not finite, or grew "
            f"{GROWTH:,.0f}-fold"
        )
    if kind == "overflow":
        return "the gradient overflowed in fp16"
    if kind == "nonfinite":
        return "loss or gradient is not finite"
    key, name = ("loss", "the loss") if kind == "spike" else ("grad_norm", "the gradient's norm")
    usual = figures.get(USUAL[kind == "outlier"])
    return f"{name} is {figures.get(key, 0.0):.4g}" + (f", and about {usual:.4g} is usual" if usual else "")


def found_in(figures: Mapping[str, Any]) -> list[str]:
    """The faults of a step, by `KINDS`."""
    return [kind for kind in KINDS if figures.get(kind) == 1]


def counts(lines: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many steps had each kind of fault, and how often the run went back; without zeros."""
    found: dict[str, int] = {}
    for line in lines:
        for kind in (*found_in(line), *([ROLLBACK] if ROLLBACK in line else [])):
            found[kind] = found.get(kind, 0) + 1
    return found


def in_words(found: Mapping[str, int]) -> str:
    """Counts as text: "1 not finite, 2 spikes of the loss, 1 rollback"."""
    words = {kind: KINDS.get(kind, "rollback(s)").replace("(s)", "s" * (n != 1)) for kind, n in found.items()}
    return ", ".join(f"{n} {words[kind]}" for kind, n in found.items())


def events(lines: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """(step, what was wrong) of a run's metrics, in order. Overflows of fp16 are usual, and left out."""
    found = []
    for line in lines:
        if isinstance(back := line.get(ROLLBACK), dict):
            found.append((line["step"], f"{back.get('why')}. The run went back to this step"))
        if said := "; ".join(described(kind, line) for kind in found_in(line) if kind != "overflow"):
            found.append((line["step"], said))
    return found


def section(lines: Sequence[Mapping[str, Any]]) -> str:
    """The events of a run as HTML; "" if nothing was wrong."""
    if not (every := events(lines)):
        return ""
    before = len(every) - SHOWN
    more = f'<p class="none">{before:,} earlier ones are in metrics.jsonl.</p>' if before > 0 else ""
    rows = [(f"{step:,}", said) for step, said in every[-SHOWN:]]
    return f"<p>{escape(in_words(counts(lines)))}.</p>{more}{table(('Step', 'What was wrong'), rows)}"


RESTARTS = "restarts.jsonl"


def add_restart(run: Path, **line: Any) -> None:
    """Appends a line. Fields: kind, why (one message), died_after (the last step of metrics.jsonl), from_step (that of
    the newest checkpoint, or 0), ranks, wait_s."""
    with Lines(run / RESTARTS) as file:
        file.write(json.dumps({"time": time.strftime("%Y-%m-%d %H:%M:%S")} | line))


def read_restarts(run: Path) -> list[dict[str, Any]]:
    """The restarts of a run, oldest first. A line that a crash cut off is left out."""
    path = run / RESTARTS
    lines = read_bytes(path, MOST_JSON).splitlines() if path.is_file() else ()
    return [line for line in map(json_object, lines) if line is not None]


def restart_figures(run: Path) -> dict[str, int]:
    """For the summary: the number of restarts, if there were any."""
    count = len(read_restarts(run))
    return {"restarts": count} if count else {}


def restarts_section(run: Path, rows: int = 20) -> str:
    """The restarts as a table for the report; the last ones if there are many. Empty without any."""
    lines = read_restarts(run)
    if not lines:
        return ""
    keys = ("time", "died_after", "from_step", "ranks", "why")
    cells = [[str(line.get(key, ""))[:300] for key in keys] for line in lines[-rows:]]
    shown = table(("when", "last step", "restarted from", "ranks", "because"), cells)
    return f'<p>{len(lines)} restart{"s" * (len(lines) != 1)}.</p><div class="scroll">{shown}</div>'
