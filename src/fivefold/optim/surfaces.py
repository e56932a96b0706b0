"""Surfaces of two variables on which optimizers differ, and the paths of the registry's optimizers over them.

They are those of textbooks: round contours, a ravine, a saddle point, and a local optimum before a better one. The
point is one matrix (1, 2) inside a block, so every optimizer updates it by its own rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fivefold.optim.registry import OPTIMIZERS

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
    return min(
        paths, key=lambda found: found[1][-1][2] if found[1][-1][2] == found[1][-1][2] else float("inf")
    )
