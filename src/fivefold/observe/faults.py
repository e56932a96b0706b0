"""Steps in which something was wrong: their names in metrics.jsonl, in words, and as a section of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fivefold.observe.document import table

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
