"""What `fivefold bench gpu` found, as rows: lines for a terminal, and one page with pictures that needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from fivefold.draw.canvas import Canvas, css, text_width
from fivefold.errors import printable
from fivefold.observe.format import asset, document, section, short_number, table

RATES = {"GB/s", "tokens/s", "%"}
"""More of these is better, and less of other units."""


class Row(NamedTuple):
    """A result. measured: a figure in `unit`, or words. expected: what it is compared with. advice: what to do about it
    if it fell short, else ""."""

    name: str
    measured: float | str
    unit: str = ""
    expected: float | None = None
    advice: str = ""

    @property
    def cells(self) -> tuple[str, str, str, str]:
        measured = self.measured if isinstance(self.measured, str) else short_number(self.measured)
        expected = "" if self.expected is None else short_number(self.expected)
        return self.name, f"{measured} {self.unit}".strip(), expected, self.advice


def rows(found: dict[str, Any]) -> list[Row]:
    """A trial's rows, and why there are no more."""
    broken = [Row("", "no result", advice=found["why"])] if "why" in found else []
    return [*(Row(**row) for row in found["rows"]), *broken]


def line(row: Row) -> str:
    """The row for a terminal."""
    name, measured, expected, advice = row.cells
    beside = f"(expected {expected})" if expected else ""
    return " ".join(filter(None, ["SHORT" * bool(advice), name, measured, beside, advice]))


def page(report: dict[str, Any], about: Mapping[str, str]) -> str:
    """The page: what fell short, then each part with its picture. about: a sentence on each part."""
    machine, sections, short = report["machine"], "", list[tuple[str, Row]]()
    for part, trials in report["parts"].items():
        some = [(name, row) for name, found in trials.items() for row in rows(found)]
        short += [(f"{part}: {name}", row) for name, row in some if row.advice]
        sections += section(part, f"<p>{about[part]}</p>{_picture(some)}{_table(some)}" * bool(some))
    on = ", ".join(gpu["name"] for gpu in machine["gpus"]) or "a CPU, at tiny sizes, which show no speed"
    head = f"<header><h1>GPUs</h1><p class='lead'>{escape(printable(on))}</p></header>"
    first = section("Short of what was expected", _table(short) if short else "<p>Nothing.</p>")
    facts = section("Machine", table(["", ""], machine.items()))
    style = f"{asset('report.css')}\n{css()}svg.canvas {{ max-width: 100%; height: auto; }}"
    return document("Fivefold: GPUs", f"{head}<main>{first}{sections}{facts}</main>", style, "")


def _table(some: Sequence[tuple[str, Row]]) -> str:
    named = [(": ".join(filter(None, (name, row.name))), *row.cells[1:]) for name, row in some]
    return table(["", "measured", "expected", "what to do"], named)


def _picture(some: Sequence[tuple[str, Row]]) -> str:
    """Bars: how much of what was expected was reached; "" where nothing was expected."""
    canvas = Canvas("Measured beside expected (longer is better)")
    bars = [
        (f"{name} {row.name}", row)
        for name, row in some
        if row.expected and row.measured and isinstance(row.measured, float)
    ]
    left = 40 + max((text_width(label) for label, _ in bars), default=0)
    for y, (label, row) in zip(range(40, 40 + 20 * len(bars), 20), bars, strict=True):
        ratio = (float(row.measured) / (row.expected or 1.0)) ** (1 if row.unit in RATES else -1)
        canvas.text(left - 8, y + 12, label, "end")
        color = "orange" if row.advice else "green"
        canvas.bar(left, y, 14, [(color, 150 * min(ratio, 2.0), label)], f"{ratio:.3g}", left + 150)
    canvas.line("line now", [(left + 150, 34), (left + 150, canvas.height + 4)])
    return canvas.svg() * bool(bars)
