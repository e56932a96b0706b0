"""The numbers of a training step in a precision mode: which tensor has which format, and where it changes. As data,
made of the mode's card and of the matmuls that run, as text, and as a picture with a column per format."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from fivefold.draw.canvas import Canvas
from fivefold.precision import DTYPES, MASTER, PRECISIONS, sent
from fivefold.precision.formats import FORMATS
from fivefold.recipe.schema import PrecisionSection

SUM = "Σ"
"""The sum of a matmul's products, which all devices keep in fp32."""
MANY = 1 << 20  # rows and columns of a matrix that is larger than any tile
COLUMNS = {form.torch or name: name for name, form in FORMATS.items()} | {name: name for name in FORMATS}
"""Formats by the names of torch's dtypes, and by their own."""


Row = Sequence[tuple[str, str]]
"""(name, format) of the tensors that are there together."""


class Part(NamedTuple):
    """A part of the step. Each row is computed from the one above it: a tensor from that with its name, else from
    all."""

    title: str
    color: str
    rows: Sequence[Row]


def parts(precision: PrecisionSection) -> list[Part]:
    """The step, from the masters to the masters. precision: of a recipe, with another mode than "auto"."""
    from torch import Size

    from fivefold.kernels.rounded import rounded_matmuls

    mode = PRECISIONS[precision.mode]
    w, rounded, found = mode.working, rounded_matmuls(mode, precision), list[Part]()

    def add(title: str, color: str, *rows: Row) -> None:
        named = [
            [(name, COLUMNS.get(form) or COLUMNS[DTYPES[form].torch]) for name, form in row] for row in rows
        ]
        found.append(Part(title, color, named))

    def matmul(title: str, color: str, a: str, b: str, result: str) -> None:
        forms = [mode.products] * 2
        if rounded:
            forms = [(rounded.gradients if a == "dY" else rounded.inputs).name, rounded.inputs.name]
        factors = [[*zip((a, b), forms, strict=True)]] if forms[0] else []
        add(title, color, [(a, w), (b, w)], *factors, [(SUM, MASTER)], [(result, w)])

    if mode.copies:
        add("Once per step: W for computing", "grey", [("W", mode.master)], [("W", w)])
    if rounded:
        tiles = (rounded.tile(Size((MANY, MANY)), weight) for weight in (False, True))
        x, y = (" x ".join("all" if n == MANY else str(n) for n in tile) for tile in tiles)
        add(f"A scale per {x} of X, dY; {y} of W", "grey")
    matmul("Forward, a linear layer: Y = X Wᵀ", "blue", "X", "W", "Y")
    by, back = (f" x {precision.loss_scale:g}", ", unscaled") if mode.scaled else ("", "")
    add(f"Loss{by}", "blue", [("Y", w)], [("loss", MASTER)], [("dY", w)])
    matmul("Backward: dX = dY W", "green", "dY", "W", "dX")
    matmul("Backward: dW = dYᵀ X", "green", "dY", "X", "dW")
    summed = [("sum", mode.gradient)]
    message = [("sent", sent(mode, precision.reduce))]
    add("dW: added over microbatches, over ranks", "green", [("dW", w)], summed, message)
    how = f", rounded ({precision.rounding})" if mode.rounds else ""
    after = [("W", mode.master)]
    add(f"Update{back}{how}", "purple", summed, [("states", mode.state)], [("W - step", MASTER)], after)
    return found


def to_text(flow: Sequence[Part]) -> str:
    """What is made of what, a line per part."""
    rows = [" > ".join(", ".join(map(" ".join, row)) for row in part.rows) for part in flow]
    return "\n".join(f"{part.title}\n  {line}".rstrip() for part, line in zip(flow, rows, strict=True)) + "\n"


WIDE, LEFT, TOP, HIGH, STEP = 344, 16, 80, 20, 38  # pixels: all columns, margins, a box, from row to row


def to_svg(flow: Sequence[Part], title: str) -> str:
    """The step from top to bottom."""
    there = {form for part in flow for row in part.rows for _, form in row}
    columns = [name for name in reversed(FORMATS) if name in there]
    canvas, wide, top = Canvas(title), WIDE / len(columns), TOP + 32

    def place(row: Row, name: str, form: str) -> tuple[float, float]:
        """The left edge of a tensor's box, and its width: tensors of a format share its column."""
        names = [other for other, its in row if its == form]
        box = (wide - 12) / len(names)
        return LEFT + 6 + columns.index(form) * wide + names.index(name) * box, box

    canvas.legend(LEFT, 46, [("line orange", "changes its format"), ("line soft", "is computed from")])
    canvas.text(LEFT, 66, f"{SUM}: sum of a matmul's products", "soft")
    high = 32 + sum(30 + STEP * len(part.rows) for part in flow)
    for number, name in enumerate(columns):
        canvas.rect("idle", LEFT + number * wide + 1, TOP, wide - 2, high)
        canvas.text(LEFT + (number + 0.5) * wide, TOP + 16, name, "name middle")
    for part in flow:
        canvas.text(LEFT + 6, top + 14, part.title)
        for y, above, row in zip(count(top + 24, STEP), [(), *part.rows], part.rows, strict=False):
            for name, form in row:
                left, box = place(row, name, form)
                canvas.box(part.color, left + 1, y, box - 2, HIGH, f"{name} in {form}", name)
                for source in [one for one in above if one[0] == name] or above:
                    start, other = place(above, *source)
                    color = "soft" if source[1] == form or name == SUM else "orange"
                    canvas.arrow(color, (start + other / 2, y - STEP + HIGH + 1), (left + box / 2, y - 1))
        top += 30 + STEP * len(part.rows)
    return canvas.svg()
