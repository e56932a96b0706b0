"""Draws terms of a plan as bars: states by ZeRO stage, activations of a block by formula. They work in light and dark
mode."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from fivefold.lessons.terms import KINDS, scaled
from fivefold.plan.pages.svg import caption, document, legend

WIDTH, ROW, RIGHT = 760, 28, 80  # pixels: a picture, a row, room for a sum behind its bar
STATES: dict[str, str] = dict(zip(KINDS, ("weights", "gradients", "masters, moments"), strict=True))
"""Words for each kind of state, by its colour."""
ACTIVATIONS = {"activations": ""}


def bars(rows: Mapping[str, Mapping[str, float]], kinds: Mapping[str, str], title: str) -> str:
    """A bar for each row: its bytes of each kind side by side, and their sum. kinds: words by colour."""
    most = max(sum(row.values()) for row in rows.values())
    left, top = 32 + 6.6 * max(map(len, rows)), 60 if len(kinds) > 1 else 40
    scale = (WIDTH - left - RIGHT) / most
    parts = [legend(list(kinds), list(kinds.values()), 20)] if len(kinds) > 1 else []
    for number, (name, row) in enumerate(rows.items()):
        x, y = left, top + ROW * number
        parts.append(caption(20, y + 15, name))
        for kind in kinds:
            wide, words = row[kind] * scale, f"{name}: {kinds[kind]} {scaled(row[kind], 1000, 'B')}"
            parts.append(
                f'<rect class="{kind}" x="{x:.2f}" y="{y}" width="{wide:.2f}" height="20">'
                f"<title>{escape(words)}</title></rect>"
            )
            x += wide
        parts.append(caption(x + 6, y + 15, scaled(sum(row.values()), 1000, "B")))
    return document(title, "".join(parts), top + ROW * len(rows) + 8, WIDTH, 20)


def states(found: Mapping[str, Mapping[str, float]], title: str) -> str:
    """A bar for each ZeRO stage. found: `terms.states_by_stage`."""
    return bars(found, STATES, title)


def activations(formulas: Mapping[str, tuple[str, float]], title: str) -> str:
    """A bar for each formula. formulas: (formula, bytes) by name."""
    rows = {f"{name}: {formula}": {"activations": size} for name, (formula, size) in formulas.items()}
    return bars(rows, ACTIVATIONS, title)
