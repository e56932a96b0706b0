"""Draws terms of a plan as bars: states by ZeRO stage, activations of a block by formula."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold.draw.canvas import Canvas, text_width
from fivefold.lessons.terms import KINDS, scaled
from fivefold.observe.memory_picture import COLORS

WIDTH, ROW, RIGHT = 760, 28, 80  # pixels: a picture, a row, room for a sum behind its bar
STATES: dict[str, str] = dict(zip(KINDS, ("weights", "gradients", "masters, moments"), strict=True))
"""Words for each kind of state."""
ACTIVATIONS = {"activations": ""}


def bars(rows: Mapping[str, Mapping[str, float]], kinds: Mapping[str, str], title: str) -> str:
    """A bar for each row: its bytes of each kind side by side, and their sum. kinds: with their words."""
    canvas, left = Canvas(title, width=WIDTH), 32 + max(map(text_width, rows))
    scale = (WIDTH - left - RIGHT) / max(sum(row.values()) for row in rows.values())
    if len(kinds) > 1:
        canvas.legend(20, 46, [(COLORS[kind], words) for kind, words in kinds.items()])
    for number, (name, row) in enumerate(rows.items()):
        y = (60 if len(kinds) > 1 else 40) + ROW * number
        canvas.text(20, y + 15, name)
        parts = [
            (COLORS[kind], row[kind] * scale, f"{name}: {words} {scaled(row[kind], 1000, 'B')}")
            for kind, words in kinds.items()
        ]
        canvas.bar(left, y, 20, parts, scaled(sum(row.values()), 1000, "B"))
    return canvas.svg()


def states(found: Mapping[str, Mapping[str, float]], title: str) -> str:
    """A bar for each ZeRO stage. found: `terms.states_by_stage`."""
    return bars(found, STATES, title)


def activations(formulas: Mapping[str, tuple[str, float]], title: str) -> str:
    """A bar for each formula. formulas: (formula, bytes) by name."""
    rows = {f"{name}: {formula}": {"activations": size} for name, (formula, size) in formulas.items()}
    return bars(rows, ACTIVATIONS, title)
