"""Compares the predictions in RUN/plan.json with the measurements that the run adds at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from fivefold.errors import UserError, printable
from fivefold.files import read_json
from fivefold.observe.document import table
from fivefold.observe.format import size
from fivefold.observe.summary import column, finite


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
    try:
        return read_json(run / "plan.json")
    except (OSError, UserError):
        return {}


def step_seconds(lines: Sequence[dict[str, Any]]) -> float | None:
    """Median seconds of a step. The first tenth of the steps, at least two, are left out: caches warm up in them."""
    seconds = finite(column(lines, "step_s")[1])
    kept = seconds[max(2, len(seconds) // 10) :]
    return median(kept) if kept else None


def rows(plan: Mapping[str, Any]) -> list[Comparison]:
    """The figures of plan.json that are both predicted and measured."""
    predicted, measured = plan.get("predicted"), plan.get("measured")
    if not isinstance(predicted, dict) or not isinstance(measured, dict):
        return []
    found: list[Comparison] = []

    def add(name: str, said: Any, came: Any, show: Callable[[float], str]) -> None:
        if isinstance(said, int | float) and isinstance(came, int | float) and came > 0:
            found.append(Comparison(name, show(said), show(came), said / came - 1))

    add("step time", predicted["time"]["step_s"], measured.get("step_s"), lambda s: f"{s:.4g} s")
    add("tensors of rank 0", _tensors(plan), measured.get("memory_bytes"), size)
    said, sent = predicted.get("sent_as_counted"), measured.get("sent_bytes")
    if said is not None and sent is not None:
        for axis in sorted({*said, *sent}):
            add(f"sent per step, {printable(axis)}", said.get(axis, 0), sent.get(axis, 0), size)
    return found


def _tensors(plan: Mapping[str, Any]) -> float:
    """Peak bytes of rank 0: exact if they were traced, else by the formula."""
    exact = plan.get("exact")
    if exact:
        return exact[0]["memory"]["peak_bytes"]
    return plan["predicted"]["memory"]["per_stage"][0]["total"]


def section(plan: Mapping[str, Any]) -> str:
    """The section of the report, as HTML."""
    found = rows(plan)
    if not found:
        why = plan.get("why") or "This run has no prediction."
        return f'<p class="none">{escape(str(why))}</p>'
    cells = [(row.name, row.predicted, row.measured, f"{100 * row.error:+.1f}%") for row in found]
    return table(("Figure", "Predicted", "Measured", "Error"), cells) + _fitted(plan) + _tracked(plan)


def _fitted(plan: Mapping[str, Any]) -> str:
    """A note on a machine without a table."""
    fitted = plan["predicted"].get("fitted")
    if fitted is None:
        return ""
    return (
        f"<p>This machine was not measured, so the step time was fitted to steps {int(fitted['from_step'])} to "
        f"{int(fitted['to_step'])}, and is compared with later ones. <code>fivefold bench hardware</code> measures "
        "it.</p>"
    )


def _tracked(plan: Mapping[str, Any]) -> str:
    """A note on memory, for a run that did not track its tensors."""
    if plan["measured"].get("memory_bytes") is not None:
        return ""
    return (
        f"<p>Tensors of rank 0: {size(_tensors(plan))}, predicted but not measured. Peak memory elsewhere on this page "
        "is that of the process, with Python and its libraries. <code>observe.memory_step = 2</code> tracks every "
        "tensor in the first and the second step.</p>"
    )
