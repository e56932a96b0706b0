"""The data of a run on its page: what was seen of each source, and a curve per validation set. All is escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from fivefold.draw.palette import LIGHT
from fivefold.errors import UserError, printable
from fivefold.files import read_json
from fivefold.observe.chart import Chart, Series
from fivefold.observe.document import table
from fivefold.observe.format import short_number
from fivefold.observe.summary import by_name, column

FILE, SETS = "data.json", "sets"
Lines = Sequence[dict[str, Any]]


def validation_chart(lines: Lines, span: tuple[int, int], key: str = "val_losses") -> Chart:
    """A curve per validation set."""
    names = dict.fromkeys(name for line in lines for name in by_name(line, key))
    series = [
        Series(printable(name), *column(lines, f"{key}/{name}"), f"c{number % len(LIGHT)}")
        for number, name in enumerate(names)
    ]
    return Chart(SETS, "Loss by validation set", series, span, log=True, wide=True)


def section(run: Path, lines: Lines) -> str:
    """What was seen of each source; "" if the run does not say it."""
    try:
        facts = read_json(run / FILE)
    except (OSError, UserError):
        return ""
    sources = facts.get("sources")
    if not sources:
        return ""
    seen = next((by_name(line, "source_tokens") for line in reversed(lines) if "source_tokens" in line), {})
    if not seen and len(sources) == 1:
        seen = {sources[0]["name"]: max((float(line.get("tokens") or 0) for line in lines), default=0.0)}
    whole = max(1.0, math.fsum(n for n in seen.values() if math.isfinite(n)))
    rows = []
    for source in sources:
        tokens, size = seen.get(source["name"], 0.0), source["tokens"]  # None: a stream's end is not known
        rows.append(
            (
                source["name"] or "the source",
                source["source"],
                "not known" if size is None else short_number(float(size)),
                short_number(tokens),
                f"{100 * tokens / whole:.3g}%",
                "-" if size is None else f"{tokens / max(1.0, float(size)):.2f}",
            )
        )
    titles = ("Source", "What", "Tokens there are", "Tokens seen", "Share of the run", "Epochs")
    stages = "".join(f"<li>{escape(printable(str(line)))}</li>" for line in facts.get("stages", ()))
    return table(titles, rows) + (f"<p>Shares, by weight:</p><ul>{stages}</ul>" if stages else "")
