"""Refits a machine's table to finished runs by three factors: computation, messages and Python.

The table is measured one operation at a time, but training shares the caches with other operations. The factors
minimise the squared logarithms of predicted over measured step times, with a pull towards 1 that a few runs outweigh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, median
from typing import Any

from fivefold.plan.cluster.devices import of_table
from fivefold.plan.cluster.measured import FACTORS, Measured
from fivefold.plan.documents import Documents, documents_of
from fivefold.plan.predict import predict
from fivefold.plan.software import of
from fivefold.recipe import Recipe

PULL = 0.005
"""Weight of (log factor)^2 beside the runs' squared errors. A factor of 1.1 costs as much as an error of 0.7%."""
ROUNDS = 8
STEP = 0.02  # step of a factor's logarithm for numerical derivatives


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: its recipe and its median step time in seconds."""

    name: str
    recipe: Recipe
    seconds: float

    @cached_property
    def documents(self) -> Documents | None:
        return documents_of(self.recipe)

    def predicted(self, table: Measured) -> float:
        """Seconds of a step on a machine with this table."""
        cluster = of_table(table)
        software = replace(of(cluster), documents=self.documents)
        return predict(self.recipe, cluster, software).step.seconds


@dataclass(frozen=True)
class Fit:
    """A calibrated table. before, after: relative error of the prediction for each run."""

    table: Measured
    before: list[float]
    after: list[float]

    def as_json(self) -> dict[str, Any]:
        return {
            "factors": self.table.factors,
            "fitted": self.table.fitted,
            "before": self.before,
            "after": self.after,
        }


def fit(table: Measured, runs: Sequence[FinishedRun]) -> Fit:
    """Fits the factors by Gauss-Newton on their logarithms, starting at 1."""
    plain = replace(table, factors=dict.fromkeys(FACTORS, 1.0), fitted=[])
    logs = [0.0] * len(FACTORS)
    for _ in range(ROUNDS):
        residuals = _residuals(plain, logs, runs)
        columns = []
        for i in range(len(FACTORS)):
            moved = [x + STEP * (i == j) for j, x in enumerate(logs)]
            columns.append(
                [(a - b) / STEP for a, b in zip(_residuals(plain, moved, runs), residuals, strict=True)]
            )
        matrix = [
            [sum(a * b for a, b in zip(x, y, strict=True)) + PULL * (i == j) for j, y in enumerate(columns)]
            for i, x in enumerate(columns)
        ]
        right = [
            -sum(a * r for a, r in zip(x, residuals, strict=True)) - PULL * log
            for x, log in zip(columns, logs, strict=True)
        ]
        logs = [log + change for log, change in zip(logs, _solve(matrix, right), strict=True)]
    fitted = [{"run": run.name, "step_s": run.seconds} for run in runs]
    best = replace(_with(plain, logs), fitted=fitted)
    zero = [0.0] * len(FACTORS)
    return Fit(best, _errors(plain, zero, runs), _errors(plain, logs, runs))


def _with(table: Measured, logs: Sequence[float]) -> Measured:
    return replace(table, factors={name: math.exp(x) for name, x in zip(FACTORS, logs, strict=True)})


def _residuals(table: Measured, logs: Sequence[float], runs: Sequence[FinishedRun]) -> list[float]:
    scaled = _with(table, logs)
    return [math.log(run.predicted(scaled) / run.seconds) for run in runs]


def _errors(table: Measured, logs: Sequence[float], runs: Sequence[FinishedRun]) -> list[float]:
    return [math.exp(residual) - 1 for residual in _residuals(table, logs, runs)]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solves three linear equations by Cramer's rule."""
    whole = _determinant(matrix)
    found = []
    for column in range(3):
        swapped = [[right[i] if j == column else matrix[i][j] for j in range(3)] for i in range(3)]
        found.append(_determinant(swapped) / whole)
    return found


def _determinant(m: list[list[float]]) -> float:
    return sum(
        m[0][i] * (m[1][(i + 1) % 3] * m[2][(i + 2) % 3] - m[1][(i + 2) % 3] * m[2][(i + 1) % 3])
        for i in range(3)
    )


def describe(found: Fit) -> list[str]:
    """The fit as lines of text."""
    lines = [f"{'run':32} {'measured s':>11} {'before':>8} {'after':>8}"]
    for run, before, after in zip(found.table.fitted, found.before, found.after, strict=True):
        lines.append(
            f"{run['run'][-32:]:32} {run['step_s']:11.4f} {100 * before:+7.1f}% {100 * after:+7.1f}%"
        )
    means = [100 * fmean(map(abs, errors)) for errors in (found.before, found.after)]
    worst = [100 * max(map(abs, errors)) for errors in (found.before, found.after)]
    middle = [100 * median(map(abs, errors)) for errors in (found.before, found.after)]
    lines.append(
        f"absolute error: mean {means[0]:.1f}% -> {means[1]:.1f}%, median {middle[0]:.1f}% -> {middle[1]:.1f}%, "
        f"worst {worst[0]:.1f}% -> {worst[1]:.1f}%"
    )
    factors = ", ".join(f"{name} x {factor:.3f}" for name, factor in found.table.factors.items())
    return [*lines, f"seconds are multiplied: {factors}"]
