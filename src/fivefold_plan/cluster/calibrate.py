"""Refits a machine's table to finished runs by three factors: computation, messages and Python.

The table is measured one operation at a time, but training shares the caches with other operations. The factors
minimise the squared logarithms of predicted over measured step times, with a pull towards 1 that a few runs outweigh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.recipe import Recipe
from fivefold_plan.cluster.devices import of_table
from fivefold_plan.cluster.measured import FACTORS, Measured
from fivefold_plan.predict import predict
from fivefold_plan.setting import Documents, documents_of, software_of

Array = NDArray[np.float64]
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
    zero, eye = np.zeros(len(FACTORS)), np.eye(len(FACTORS))
    logs = zero
    for _ in range(ROUNDS):
        residuals = _residuals(plain, logs, runs)
        slopes = np.stack([_residuals(plain, logs + STEP * row, runs) - residuals for row in eye], 1) / STEP
        logs = logs - np.linalg.solve(slopes.T @ slopes + PULL * eye, slopes.T @ residuals + PULL * logs)
    fitted = [{"run": run.name, "step_s": run.seconds} for run in runs]
    best = replace(_with(plain, logs), fitted=fitted)
    before, after = (np.expm1(_residuals(plain, point, runs)).tolist() for point in (zero, logs))
    return Fit(best, before, after)


def _with(table: Measured, logs: Array) -> Measured:
    return replace(table, factors=dict(zip(FACTORS, np.exp(logs).tolist(), strict=True)))


def _residuals(table: Measured, logs: Array, runs: Sequence[FinishedRun]) -> Array:
    cluster, errors = of_table(_with(table, logs)), list[float]()
    for run in runs:
        software = replace(software_of(cluster), documents=run.documents)
        errors.append(predict(run.recipe, cluster, software).step.seconds / run.seconds)
    return np.log(errors)


def describe(found: Fit) -> list[str]:
    lines = [f"{'run':32} {'measured s':>11} {'before':>8} {'after':>8}"]
    for run, before, after in zip(found.table.fitted, found.before, found.after, strict=True):
        lines.append(
            f"{run['run'][-32:]:32} {run['step_s']:11.4f} {100 * before:+7.1f}% {100 * after:+7.1f}%"
        )
    words = []
    for name, average in (("mean", fmean), ("median", median), ("worst", max)):
        before, after = (
            100 * average([abs(error) for error in errors]) for errors in (found.before, found.after)
        )
        words.append(f"{name} {before:.1f}% -> {after:.1f}%")
    lines.append(f"absolute error: {', '.join(words)}")
    factors = ", ".join(f"{name} x {factor:.3f}" for name, factor in found.table.factors.items())
    return [*lines, f"seconds are multiplied: {factors}"]
