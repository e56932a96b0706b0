"""Draws paths of optimizers over surfaces (optim/surfaces.py), as SVG for light and dark themes and for terminals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from fivefold.observe.palette import DARK, LIGHT
from fivefold.optim.surfaces import SURFACES, Surface

Path = Sequence[tuple[float, float, float]]
Paths = Mapping[str, Mapping[str, tuple[float, Path]]]
"""{surface: {optimizer: (learning rate, its path)}}."""
FAMILIES = {
    "without and with momentum": ("sgd", "momentum", "nesterov"),
    "a rate per weight": ("adagrad", "rmsprop", "adam", "adamw", "radam", "nadam", "adamsage"),
    "less memory, curvature, whole matrices": ("adamw8bit", "adafactor", "lion", "sophia", "soap", "muon"),
}
WIDTH, HEIGHT, LEFT, TOP, GAP, LEGEND = 260, 200, 16, 64, 14, 44  # pixels of a panel, margins
COLUMNS, ROWS, LEVELS = 36, 28, 9  # of the grid of contours
STYLE = (
    '.paths { color-scheme: light dark; font: 12px system-ui, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif;'
    " --paper: #fdfcf9; --ink: #22211f; --soft: #66625b; --rule: #d8d3c8; "
    + " ".join(f"--c{i}: {color};" for i, color in enumerate(LIGHT))
    + " }\n@media (prefers-color-scheme: dark) { .paths { --paper: #171614; --ink: #e9e6df; --soft: #a49f95; "
    "--rule: #45423b; " + " ".join(f"--c{i}: {color};" for i, color in enumerate(DARK)) + " } }\n"
    ".paths .paper { fill: var(--paper); } .paths text { fill: var(--ink); } .paths .soft { fill: var(--soft); }\n"
    ".paths .title { font-size: 15px; font-weight: 600; }\n"
    ".paths .contour { stroke: var(--rule); fill: none; } .paths .frame { stroke: var(--rule); fill: none; }\n"
    + "\n".join(
        f".paths .p{i} {{ stroke: var(--c{i}); }} .paths .e{i} {{ fill: var(--c{i}); }}"
        for i in range(len(LIGHT))
    )
    + "\n.paths polyline { fill: none; stroke-width: 1.5; stroke-linejoin: round; }"
    "\n.paths .under { stroke-width: 4.5; stroke-opacity: 0.5; }\n"  # shows below a path that goes the same way
)


def to_svg(paths: Paths) -> str:
    """A row of panels for each family of optimizers, a column for each surface."""
    names = {name for drawn in paths.values() for name in drawn}
    families = {title: [n for n in family if n in names] for title, family in FAMILIES.items()}
    families = {title: family for title, family in families.items() if family}
    width = 2 * LEFT + len(paths) * (WIDTH + GAP) - GAP
    height = TOP + len(families) * (HEIGHT + LEGEND) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="paths" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img"><style>{STYLE}</style><rect class="paper" width="{width}" height="{height}"/>',
        f'<text x="{LEFT}" y="24" class="title">Optimizers on four surfaces, each at its best learning rate; '
        "frames cut paths</text>",
    ]
    for column, name in enumerate(paths):
        x = LEFT + column * (WIDTH + GAP)
        parts.append(f'<text x="{x}" y="{TOP - 10}" class="soft">{escape(SURFACES[name].title)}</text>')
    for row, (title, family) in enumerate(families.items()):
        y = TOP + row * (HEIGHT + LEGEND)
        for column, (name, drawn) in enumerate(paths.items()):
            x = LEFT + column * (WIDTH + GAP)
            parts.append(f'<svg x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}">')
            parts += _panel(SURFACES[name], [(i, n, *drawn[n]) for i, n in enumerate(family) if n in drawn])
            parts.append("</svg>")
        parts += _legend(title, family, y + HEIGHT + 18)
    return "".join([*parts, "</svg>"]) + "\n"


def _panel(surface: Surface, drawn: Sequence[tuple[int, str, float, Path]]) -> Iterator[str]:
    yield f'<rect class="frame" width="{WIDTH}" height="{HEIGHT}"/>'
    lines = (f"M{_at(a, surface)}L{_at(b, surface)}" for a, b in contours(surface))
    yield f'<path class="contour" d="{"".join(lines)}"/>'
    for color, name, lr, path in drawn:
        points = [_at((x, y), surface) for x, y, height in path if math.isfinite(height)]
        tip = f"{name}, learning rate {lr:g}: ends at height {path[-1][2]:.3g}"
        under = " under" * (color % 2 == 0)
        yield f'<polyline class="p{color}{under}" points="{" ".join(points)}"><title>{escape(tip)}</title></polyline>'
        x, y = points[-1].split(",")
        yield f'<circle class="e{color}" cx="{x}" cy="{y}" r="3"/>'


def _legend(title: str, family: Sequence[str], y: float) -> Iterator[str]:
    x = float(LEFT)
    yield f'<text x="{x:.0f}" y="{y}" class="soft">{escape(title)}:</text>'
    x += 7.2 * len(title) + 14
    for color, name in enumerate(family):
        yield f'<circle class="e{color}" cx="{x:.0f}" cy="{y - 4}" r="4"/><text x="{x + 8:.0f}" y="{y}">{name}</text>'
        x += 8 * len(name) + 26


def _at(point: tuple[float, float], surface: Surface) -> str:
    (x0, x1), (y0, y1) = surface.limits
    x, y = (point[0] - x0) / (x1 - x0) * WIDTH, (y1 - point[1]) / (y1 - y0) * HEIGHT
    return f"{min(max(x, -WIDTH), 2 * WIDTH):.1f},{min(max(y, -HEIGHT), 2 * HEIGHT):.1f}"


def contours(surface: Surface) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    """Pieces of the contours, by marching squares. Heights are spaced by squares, so that the bottom shows."""
    (x0, x1), (y0, y1) = surface.limits
    xs = [x0 + (x1 - x0) * i / COLUMNS for i in range(COLUMNS + 1)]
    ys = [y0 + (y1 - y0) * i / ROWS for i in range(ROWS + 1)]
    heights = [[float(surface.height(x, y)) for x in xs] for y in ys]
    low, high = min(map(min, heights)), max(map(max, heights))
    for level in (low + (high - low) * (i / LEVELS) ** 2 for i in range(1, LEVELS)):
        for row in range(ROWS):
            for column in range(COLUMNS):
                around = ((column, row), (column + 1, row), (column + 1, row + 1), (column, row + 1))
                corners = [(xs[i], ys[j], heights[j][i] - level) for i, j in around]
                yield from _crossings(corners)


def _crossings(
    corners: Sequence[tuple[float, float, float]],
) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    found = []
    for (xa, ya, a), (xb, yb, b) in zip(corners, [*corners[1:], corners[0]], strict=True):
        if (a < 0) != (b < 0):
            share = a / (a - b)
            found.append((xa + share * (xb - xa), ya + share * (yb - ya)))
    yield from zip(found[::2], found[1::2], strict=False)


def to_text(
    surface: Surface, drawn: Mapping[str, tuple[float, Path]], columns: int = 76, rows: int = 22
) -> str:
    """A surface by its height (the darker, the higher), and a path for each optimizer: its letter at every step."""
    (x0, x1), (y0, y1) = surface.limits
    heights = [
        [
            surface.height(x0 + (x1 - x0) * (i + 0.5) / columns, y1 - (y1 - y0) * (j + 0.5) / rows)
            for i in range(columns)
        ]
        for j in range(rows)
    ]
    low, high = min(map(min, heights)), max(map(max, heights))
    shades = " .:-=+"
    grid = [
        [shades[int(math.sqrt((h - low) / (high - low)) * (len(shades) - 1))] for h in row] for row in heights
    ]
    lines = []
    for letter, (name, (lr, path)) in zip("abcdefghijklmnopqrstuvwxyz", drawn.items(), strict=False):
        for x, y, height in path:
            i, j = (x - x0) / (x1 - x0) * columns, (y1 - y) / (y1 - y0) * rows
            if math.isfinite(height) and 0 <= i < columns and 0 <= j < rows:
                grid[int(j)][int(i)] = letter
        first = next((n for n, at in enumerate(path) if at[2] <= low + 0.01 * (high - low)), None)
        near = (
            f"near the lowest point after {first} steps"
            if first is not None
            else "never near the lowest point"
        )
        lines.append(f"  {letter} {name:10} lr {lr:<8g} ends at {path[-1][2]:.3g}; {near}")
    return "\n".join([f"{surface.title}: {surface.shows}", *map("".join, grid), *lines])
