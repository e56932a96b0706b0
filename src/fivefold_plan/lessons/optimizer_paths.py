"""Surfaces of two variables on which optimizers differ, the paths of the registry's optimizers over them, and both
drawn, as SVG for light and dark themes and for terminals.

The surfaces are those of textbooks: round contours, a ravine, a saddle point, and a local optimum before a better one.
The point is one matrix (1, 2) inside a block, so every optimizer updates it by its own rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

from fivefold.draw.canvas import NAMES, Axes, Canvas, Scale, text_width
from fivefold.optim import OPTIMIZERS

if TYPE_CHECKING:
    from torch import Tensor

Point = tuple[float, float]
NAME = "blocks.0.point"
RATES = tuple(1e-3 * 2.0**k for k in range(11))
"""The learning rates that are tried: 0.001 to 1."""


@dataclass(frozen=True)
class Surface:
    """height: of x and y, floats or tensors. start: of the paths. limits: of the picture, ((x, x), (y, y))."""

    name: str
    title: str
    height: Callable[[Any, Any], Any]
    start: Point
    limits: tuple[Point, Point]
    shows: str

    def grid(self, columns: int, rows: int) -> tuple[list[float], list[float], list[list[float]]]:
        """(x of the columns, y of the rows from the top, heights by row), from edge to edge of the picture."""
        (x0, x1), (y0, y1) = self.limits
        xs = [x0 + (x1 - x0) * i / (columns - 1) for i in range(columns)]
        ys = [y1 - (y1 - y0) * j / (rows - 1) for j in range(rows)]
        return xs, ys, [[float(self.height(x, y)) for x in xs] for y in ys]


SURFACES = {
    surface.name: surface
    for surface in (
        Surface(
            "contours",
            "contours",
            lambda x, y: x**2 + 2 * y**2,
            (-2.2, 1.6),
            ((-2.6, 2.6), (-2.0, 2.0)),
            "The gradient stands upright on the contours. All of them arrive.",
        ),
        Surface(
            "ravine",
            "ravine",
            lambda x, y: 0.1 * x**2 + 5 * y**2,
            (-2.3, 0.9),
            ((-2.6, 1.2), (-1.2, 1.2)),
            "The steep direction limits the rate. Momentum adds up along the ravine; rates per weight level it.",
        ),
        Surface(
            "saddle",
            "saddle point",
            lambda x, y: x**2 - 0.5 * y**2 + 0.1 * y**4,
            (-1.6, 0.01),
            ((-2.2, 2.2), (-2.4, 2.4)),
            "At the saddle the gradient is almost 0. Rates per weight leave it first.",
        ),
        Surface(
            "local",
            "local optimum",
            lambda x, y: 0.25 * x**4 - 0.2 * x**3 - x**2 + 0.6 * x + y**2,
            (2.8, 0.9),
            ((-2.8, 3.2), (-1.6, 1.6)),
            "The nearer valley is not the lowest one. Only speed, or a large step, carries over the hill between them.",
        ),
    )
}


def path(
    optimizer: str, surface: Surface, lr: float, steps: int = 60, **changes: Any
) -> list[tuple[float, float, float]]:
    """(x, y, height) at the start and after each step, by the registry's optimizer."""
    import torch

    from fivefold.optim.updater import Updater

    card = OPTIMIZERS[optimizer]
    point: dict[str, Tensor] = {NAME: torch.tensor([surface.start])}
    updater = Updater(card, point, lr, 0.0, {**card.fields, **changes})
    found = [(*surface.start, float(surface.height(*surface.start)))]
    for _ in range(steps):
        at = point[NAME].clone().requires_grad_()
        surface.height(at[0, 0], at[0, 1]).backward()
        assert at.grad is not None
        updater.step({NAME: at.grad}, lr)
        x, y = point[NAME][0].tolist()
        found.append((x, y, float(surface.height(x, y))))
    return found


def tuned(
    optimizer: str, surface: Surface, steps: int = 60, rates: Sequence[float] = RATES
) -> tuple[float, list[tuple[float, float, float]]]:
    """(learning rate, path) that ends lowest of these rates."""
    paths = ((lr, path(optimizer, surface, lr, steps)) for lr in rates)
    return min(paths, key=lambda found: math.inf if math.isnan(found[1][-1][2]) else found[1][-1][2])


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


def to_svg(paths: Paths) -> str:
    """A row of panels for each family of optimizers, a column for each surface."""
    canvas = Canvas("Optimizers on four surfaces, each at its best learning rate; frames cut paths", LEFT)
    names, top = {name for drawn in paths.values() for name in drawn}, TOP
    for column, name in enumerate(paths):
        canvas.text(LEFT + column * (WIDTH + GAP), TOP - 10, SURFACES[name].title, "soft")
    for title, family in FAMILIES.items():
        colors = {name: NAMES[i] for i, name in enumerate(n for n in family if n in names)}
        if not colors:
            continue
        for column, (name, drawn) in enumerate(paths.items()):
            panel = _panel(SURFACES[name], colors, drawn)
            canvas.inset(LEFT + column * (WIDTH + GAP), top, panel, WIDTH, HEIGHT)
        canvas.text(LEFT, top + HEIGHT + 18, f"{title}:", "soft")
        keys = [(f"dot {color}", name) for name, color in colors.items()]
        canvas.legend(LEFT + text_width(title) + 14, top + HEIGHT + 18, keys)
        top += HEIGHT + LEGEND
    return canvas.svg()


def _panel(surface: Surface, colors: Mapping[str, str], drawn: Mapping[str, tuple[float, Path]]) -> Canvas:
    """The contours of a surface, and the paths of optimizers with colours."""
    panel, axes = Canvas(), _axes(surface, WIDTH, HEIGHT)
    panel.rect("frame", 0, 0, WIDTH, HEIGHT)
    pieces = (map(axes.at, piece) for piece in contours(surface))
    panel.path("grid", "".join("M{:.1f} {:.1f}L{:.1f} {:.1f}".format(*a, *b) for a, b in pieces))
    for number, (name, color) in enumerate(colors.items()):
        if name in drawn:
            lr, path = drawn[name]
            places = [axes.at((x, y)) for x, y, height in path if math.isfinite(height)]
            places = [(min(max(x, -WIDTH), 2 * WIDTH), min(max(y, -HEIGHT), 2 * HEIGHT)) for x, y in places]
            wide = " wide" * (number % 2 == 0)  # shows below a path that goes the same way
            tip = f"{name}, learning rate {lr:g}: ends at height {path[-1][2]:.3g}"
            panel.line(f"line {color}{wide}", places, tip)
            panel.circle(color, *places[-1], 3)
    return panel


def _axes(surface: Surface, right: float, bottom: float) -> Axes:
    across, up = (Scale(*limits, ()) for limits in surface.limits)
    return Axes(0, 0, right, bottom, across, up)


def contours(surface: Surface) -> Iterator[tuple[Point, Point]]:
    """Pieces of the contours, by marching squares. Heights are spaced by squares, so that the bottom shows."""
    xs, ys, heights = surface.grid(COLUMNS + 1, ROWS + 1)
    low, high = min(map(min, heights)), max(map(max, heights))
    levels = [low + (high - low) * (i / LEVELS) ** 2 for i in range(1, LEVELS)]
    for level, row, column in product(levels, range(ROWS), range(COLUMNS)):
        around = ((column, row), (column + 1, row), (column + 1, row + 1), (column, row + 1))
        corners, crossings = [(xs[i], ys[j], heights[j][i] - level) for i, j in around], []
        for (xa, ya, a), (xb, yb, b) in pairwise([*corners, corners[0]]):
            if (a < 0) != (b < 0):
                share = a / (a - b)
                crossings.append((xa + share * (xb - xa), ya + share * (yb - ya)))
        yield from zip(crossings[::2], crossings[1::2], strict=False)


def to_text(
    surface: Surface, drawn: Mapping[str, tuple[float, Path]], columns: int = 76, rows: int = 22
) -> str:
    """A surface by its height (the darker, the higher), and a path for each optimizer: its letter at every step."""
    _, _, heights = surface.grid(columns, rows)
    low, high = min(map(min, heights)), max(map(max, heights))
    axes, shades = _axes(surface, columns - 1, rows - 1), " .:-=+"
    grid = [
        [shades[int(math.sqrt((h - low) / (high - low)) * (len(shades) - 1))] for h in row] for row in heights
    ]
    lines = []
    for letter, (name, (lr, path)) in zip("abcdefghijklmnopqrstuvwxyz", drawn.items(), strict=False):
        for x, y, height in path:
            if math.isfinite(height):
                i, j = map(round, axes.at((x, y)))
                if 0 <= i < columns and 0 <= j < rows:
                    grid[j][i] = letter
        first = next((n for n, at in enumerate(path) if at[2] <= low + 0.01 * (high - low)), None)
        near = "never near the lowest point"
        if first is not None:
            near = f"near the lowest point after {first} steps"
        lines.append(f"  {letter} {name:10} lr {lr:<8g} ends at {path[-1][2]:.3g}; {near}")
    return "\n".join([f"{surface.title}: {surface.shows}", *map("".join, grid), *lines])
