"""RUN/restarts.jsonl: a line for each time that the ranks were started again, and why."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from fivefold.files import MOST_JSON, Lines, parse_json, read_bytes
from fivefold.observe.document import table

FILE = "restarts.jsonl"


def add(run: Path, **line: Any) -> None:
    """Appends a line. Fields: kind, why (one message), died_after (the last step of metrics.jsonl), from_step (that of
    the newest checkpoint, or 0), ranks, wait_s."""
    with Lines(run / FILE) as file:
        file.write(json.dumps({"time": time.strftime("%Y-%m-%d %H:%M:%S")} | line))


def read(run: Path) -> list[dict[str, Any]]:
    """The restarts of a run, oldest first. A line that a crash cut off is left out."""
    found = []
    path = run / FILE
    if path.is_file():
        for raw in read_bytes(path, MOST_JSON).splitlines():
            try:
                line = parse_json(raw)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict):
                found.append(line)
    return found


def figures(run: Path) -> dict[str, int]:
    """For the summary: the number of restarts, if there were any."""
    count = len(read(run))
    return {"restarts": count} if count else {}


def section(run: Path, rows: int = 20) -> str:
    """The restarts as a table for the report; the last ones if there are many. Empty without any."""
    lines = read(run)
    if not lines:
        return ""
    keys = ("time", "died_after", "from_step", "ranks", "why")
    cells = [[str(line.get(key, ""))[:300] for key in keys] for line in lines[-rows:]]
    shown = table(("when", "last step", "restarted from", "ranks", "because"), cells)
    return f'<p>{len(lines)} restart{"s" * (len(lines) != 1)}.</p><div class="scroll">{shown}</div>'
