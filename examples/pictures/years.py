"""Models and devices over the years: sizes beside the memory of a device, matmuls beside memory, links and PCIe. Models
are the shipped recipes, devices those with a data sheet.

python examples/pictures/years.py years.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fivefold.draw.canvas import COLORS, Axes, Canvas, Scale, log_scale, stacked
from fivefold.host.devices import GB, PCIE, SHEETS
from fivefold.precision import DTYPES
from fivefold.recipe import load, parameters
from fivefold.recipe.load import published

WEIGHT = DTYPES["bf16"].bytes
WIDE, HIGH, LEFT, TOP = 360, 250, 48, 26  # pixels: a panel, margins; a line of its legend is as high as TOP


class Mark(NamedTuple):
    year: int
    value: float
    name: str


def models() -> list[Mark]:
    """Bytes of the weights of published models, in 16 bits."""
    sizes = {name: parameters(load(name)) for name in published()}
    return [Mark(year, WEIGHT * (sizes[name] or 0), name) for name, year in published().items()]


def growth() -> dict[str, list[Mark]]:
    """What devices have of each kind, as multiples of what the first one had."""
    kinds = {
        "matmuls in 16 bits, FLOP/s": [sheet.rate("bf16") or sheet.rate("fp16") or 0.0 for sheet in SHEETS],
        "memory, bytes": [sheet.memory for sheet in SHEETS],
        "memory, bytes/s": [sheet.bandwidth for sheet in SHEETS],
        "links in a node, bytes/s": [sheet.link for sheet in SHEETS],
        "PCIe, bytes/s": [PCIE[sheet.pcie] for sheet in SHEETS],
    }
    first = min(range(len(SHEETS)), key=lambda number: SHEETS[number].year)
    return {
        kind: [Mark(s.year, x / values[first], s.name) for s, x in zip(SHEETS, values, strict=True) if x]
        for kind, values in kinds.items()
    }


def records(marks: Sequence[Mark]) -> list[Mark]:
    """Those that are larger than all of earlier years, and of their own."""
    found = list[Mark]()
    for mark in sorted(marks, key=lambda mark: (mark.year, -mark.value)):
        if not found or mark.value > found[-1].value:
            found.append(mark)
    return found


def to_svg() -> str:
    """Two panels, one under the other."""
    devices = [Mark(sheet.year, sheet.memory, sheet.name) for sheet in SHEETS]
    sizes = {f"models: weights, {WEIGHT:g} bytes each": models(), "devices: memory": devices}
    in_gb = {name: [mark._replace(value=mark.value / GB) for mark in marks] for name, marks in sizes.items()}
    grown = {kind: records(marks) for kind, marks in growth().items()}
    best = {f"{kind}: x {marks[-1].value:.3g}": marks for kind, marks in grown.items()}
    title = f"Best device, as multiples of {grown['memory, bytes'][0].name}"
    return stacked([_panel("Models and devices, GB", in_gb, True), _panel(title, best, False)])


def _panel(title: str, lines: Mapping[str, Sequence[Mark]], named: bool) -> str:
    """A dot for each mark, and a line through the records; named: with their names."""
    canvas, marks = Canvas(title, width=WIDE), [mark for line in lines.values() for mark in line]
    years, values = [mark.year for mark in marks], [mark.value for mark in marks]
    across = Scale(min(years) - 0.6, max(years) + 0.6, range(min(years), max(years) + 1, 2))
    top = TOP + 18 * len(lines) + 20
    axes = Axes(LEFT, top, WIDE - 12, top + HIGH, across, log_scale(min(values), max(values) * 1.2))
    canvas.levels(axes, [f"{value:,g}" for value in axes.up.ticks])
    canvas.columns(axes, [f"{year:g}" for year in across.ticks], "year")
    for number, (color, (name, line)) in enumerate(zip(COLORS, lines.items(), strict=False)):
        canvas.legend(20, TOP + 18 * (number + 1), [(f"line {color}", name)])
        canvas.line(f"line {color}", [axes.at(mark[:2]) for mark in records(line)])
        for mark in line:
            canvas.circle(color, *axes.at(mark[:2]), 2.5, f"{mark.name}, {mark.year}: {mark.value:.3g}")
        for year, value, name in reversed(records(line) if named else []):
            (x, y), late = axes.at((year, value)), 2 * year >= across.low + across.high
            for below in (-6, 15) if late else (15, -6):
                if canvas.name(x, y + below, name, f"small {color}" + " end" * late):
                    break
    return canvas.svg()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Models and devices over the years, as an SVG picture.")
    parser.add_argument("svg", type=Path)
    parser.parse_args().svg.write_text(to_svg(), encoding="utf-8")
