"""Which tensor of a training step has which format in a precision mode, and where it changes: as text, and as a picture
with a column per format.

python examples/pictures/precision_step.py fp8
python examples/pictures/precision_step.py fp8 fp8_backward=e4m3 --svg step.svg

The dtypes are those of the mode's card (`fivefold.precision`), the formats of factors those of the matmuls that the
trainer runs (`fivefold.kernels.rounded`). So a new mode draws itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

from torch import Size

from fivefold.draw.canvas import Canvas
from fivefold.errors import UserError
from fivefold.kernels.rounded import rounded_matmuls
from fivefold.precision import DTYPES, MASTER, PRECISIONS, sent
from fivefold.precision.formats import FORMATS
from fivefold.recipe import load
from fivefold.recipe.schema import PrecisionSection

SUM = "Σ"
"""The sum of a matmul's products, which the trainer asks for in fp32. GPUs may keep fewer bits of it on the way."""
STEP = """
Once per step: W for computing | grey | W master > W weight
A scale for {tiles} | grey |
Forward, a linear layer: Y = X Wᵀ | blue | X working, W weight > X input, W input > Σ sum > Y working
Loss{factor} | blue | Y working > loss sum > dY working
Backward: dX = dY W | green | dY working, W weight > dY output, W input > Σ sum > dX working
Backward: dW = dYᵀ X | green | dY working, X working > dY output, X input > Σ sum > dW working > dW kept
dW: added over microbatches, over ranks | green | dW added > sum gradient > sent message
Update{rounding} | purple | sum gradient > states state > W - step sum > W master
"""
"""Parts of the step: title, colour, rows. A row has the tensors that are there together, with what says their dtype."""
MANY = 1 << 20  # rows and columns of a matrix that is larger than any tile
NAMES = {form.torch or name: name for name, form in FORMATS.items()} | {name: name for name in FORMATS}
"""Formats by the names of torch's dtypes, and by their own."""
Row = Sequence[tuple[str, str]]
"""(tensor, format)."""


class Part(NamedTuple):
    """Each row is computed from the one above it: a tensor from that with its name, else from all."""

    title: str
    color: str
    rows: Sequence[Row]


def parts(precision: PrecisionSection) -> list[Part]:
    """The step, from the masters to the masters. precision: of a recipe, with another mode than "auto"."""
    mode, tiles = PRECISIONS[precision.mode], ""
    dtypes = {"working": mode.working, "master": mode.master, "gradient": mode.gradient, "state": mode.state}
    dtypes |= {"sum": MASTER, "message": sent(mode, precision.reduce)}
    weight = mode.weight or mode.working
    dtypes |= {
        "weight": weight,
        "added": weight,
        "kept": mode.weight,
    }  # of gradients: rounded as the weight is, or not
    dtypes |= {"input": mode.products, "output": mode.products}  # of factors; "": they stay as they are
    if rounded := rounded_matmuls(mode, precision):
        dtypes |= {"input": rounded.inputs.name, "output": rounded.gradients.name}
        sizes = (rounded.tile(Size((MANY, MANY)), weight) for weight in (False, True))
        x, w = (" x ".join("all" if n == MANY else str(n) for n in tile) for tile in sizes)
        tiles = f"{x} of X, dY; {w} of W".replace("all x all", "all")
    words = {
        "tiles": tiles,
        "factor": f" x {precision.loss_scale:g}, undone by the update" if mode.scaled else "",
        "rounding": f", rounded: {precision.rounding}" if mode.rounds else "",
    }
    found = list[Part]()
    for line in STEP.format(**words).strip().splitlines():
        title, color, text = line.split(" |")
        cells = [[cell.strip().rsplit(" ", 1) for cell in row.split(",")] for row in text.split(">") if row]
        rows = [[(name, dtypes[which]) for name, which in row if dtypes[which]] for row in cells]
        named = [[(name, NAMES.get(d) or NAMES[DTYPES[d].torch]) for name, d in row] for row in rows if row]
        found.append(Part(title, color.strip(), named))
    return [
        part
        for part, is_there in zip(found, (weight != mode.master, tiles, *found[2:]), strict=True)
        if is_there
    ]


def to_text(flow: Sequence[Part]) -> str:
    """What is made of what, a line per part."""
    rows = [" > ".join(", ".join(map(" ".join, row)) for row in part.rows) for part in flow]
    return "\n".join(f"{part.title}\n  {line}".rstrip() for part, line in zip(flow, rows, strict=True)) + "\n"


WIDE, LEFT, TOP, HIGH, DOWN = 344, 16, 80, 20, 38  # pixels: all columns, margins, a box, from row to row


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
    high = 32 + sum(30 + DOWN * len(part.rows) for part in flow)
    for number, name in enumerate(columns):
        canvas.rect("idle", LEFT + number * wide + 1, TOP, wide - 2, high)
        canvas.text(LEFT + (number + 0.5) * wide, TOP + 16, name, "name middle")
    for part in flow:
        canvas.text(LEFT + 6, top + 14, part.title)
        for y, above, row in zip(count(top + 24, DOWN), [(), *part.rows], part.rows, strict=False):
            for name, form in row:
                left, box = place(row, name, form)
                canvas.box(part.color, left + 1, y, box - 2, HIGH, f"{name} in {form}", name)
                for source in [one for one in above if one[0] == name] or above:
                    start, other = place(above, *source)
                    color = "soft" if source[1] == form or name == SUM else "orange"
                    canvas.arrow(color, (start + other / 2, y - DOWN + HIGH + 1), (left + box / 2, y - 1))
        top += 30 + DOWN * len(part.rows)
    return canvas.svg()


def main() -> None:
    parser = argparse.ArgumentParser(description="Which tensor of a training step has which format.")
    parser.add_argument("mode", choices=PRECISIONS)
    parser.add_argument("fields", nargs="*", help="fields of [precision], such as fp8_backward=e4m3")
    parser.add_argument("--svg", type=Path, help="also draw it to this file")
    given = parser.parse_args()
    try:
        recipe = load("quickstart", [f"precision.{field}" for field in (f"mode={given.mode}", *given.fields)])
    except UserError as error:
        parser.error(str(error))
    flow = parts(recipe.precision)
    print(to_text(flow), end="")
    if given.svg:
        given.svg.write_text(to_svg(flow, f"A step in {given.mode}"), encoding="utf-8")
        print(given.svg)


if __name__ == "__main__":
    main()
