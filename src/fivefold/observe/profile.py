"""What PyTorch's profiler recorded: names of the files in RUN/traces, and a table of operators for the report."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fivefold.files import make_folder, read_json, understood, write_atomically
from fivefold.observe.document import table

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


def write(run: Path, first: int, last: int, longest: Sequence[Operator]) -> None:
    """Writes RUN/traces/profile-step-FIRST-LAST.json."""
    folder = run / "traces"
    make_folder(folder)
    rows = [one._asdict() for one in longest]
    write_atomically(
        folder / f"{_stem(first, last)}.json", json.dumps({"steps": [first, last], "operators": rows}) + "\n"
    )


def section(run: Path) -> str:
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
