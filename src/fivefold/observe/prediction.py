"""Compares the predictions in RUN/plan.json with the measurements that the run adds at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from fivefold.errors import printable
from fivefold.files import read_facts
from fivefold.observe.format import size, table
from fivefold.observe.summary import column, finite

STEP_TIME = "step time"


class Comparison(NamedTuple):
    """One figure, predicted and measured. `error`: predicted over measured, less 1."""

    name: str
    predicted: str
    measured: str
    error: float

    def __str__(self) -> str:
        return f"{self.measured}; predicted {self.predicted} ({100 * self.error:+.1f}%)"


def read(run: Path) -> dict[str, Any]:
    """The content of plan.json; {} if it is missing or broken."""
    return read_facts(run / "plan.json")


def step_seconds(lines: Sequence[dict[str, Any]]) -> float | None:
    """Median seconds of a step. The first tenth of the steps, at least two, are left out: caches warm up in them."""
    seconds = finite(column(lines, "step_s")[1])
    warm = seconds[max(2, len(seconds) // 10) :]
    return median(warm) if warm else None


def rows(plan: Mapping[str, Any]) -> list[Comparison]:
    """The figures of plan.json that are both predicted and measured."""
    predicted, measured = plan.get("predicted"), plan.get("measured")
    if not isinstance(predicted, dict) or not isinstance(measured, dict):
        return []
    pairs: list[tuple[str, Any, Any, Callable[[float], str]]] = [
        (STEP_TIME, predicted["time"]["step_s"], measured.get("step_s"), lambda s: f"{s:.4g} s"),
        ("tensors of rank 0", _tensors(plan), measured.get("memory_bytes"), size),
    ]
    counted, sent = predicted.get("sent_as_counted"), measured.get("sent_bytes")
    if counted is not None and sent is not None:
        for axis in sorted({*counted, *sent}):
            pairs.append((f"sent per step, {printable(axis)}", counted.get(axis, 0), sent.get(axis, 0), size))
    return [
        Comparison(name, show(prediction), show(measurement), prediction / measurement - 1)
        for name, prediction, measurement, show in pairs
        if isinstance(prediction, int | float) and isinstance(measurement, int | float) and measurement > 0
    ]


def _tensors(plan: Mapping[str, Any]) -> float:
    """Peak bytes of rank 0: exact if they were traced, else by the formula."""
    exact = plan.get("exact")
    if exact:
        return exact[0]["memory"]["peak_bytes"]
    return plan["predicted"]["memory"]["per_stage"][0]["total"]


def section(plan: Mapping[str, Any]) -> str:
    """The section of the report, as HTML."""
    compared = rows(plan)
    if not compared:
        why = plan.get("why") or "This run has no prediction."
        return f'<p class="none">{escape(str(why))}</p>'
    cells = [(row.name, row.predicted, row.measured, f"{100 * row.error:+.1f}%") for row in compared]
    html = table(("Figure", "Predicted", "Measured", "Error"), cells)
    if (fitted := plan["predicted"].get("fitted")) is not None:  # a machine without a table
        html += (
            f"<p>This machine was not measured, so the step time was fitted to steps {int(fitted['from_step'])} to "
            f"{int(fitted['to_step'])}, and is compared with later ones. <code>fivefold bench hardware</code> measures "
            "it.</p>"
        )
    if plan["measured"].get("memory_bytes") is None:
        html += (
            f"<p>Tensors of rank 0: {size(_tensors(plan))}, predicted but not measured. Peak memory elsewhere on this "
            "page is that of the process, with Python and its libraries. <code>observe.memory_step = 2</code> tracks "
            "every tensor in the first and the second step.</p>"
        )
    return html
