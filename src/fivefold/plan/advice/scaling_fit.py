"""Fits a scaling law to runs, with its uncertainty (arXiv 2203.15556, approach 3).

The constants minimise the Huber loss of log L over all runs. The surface has several minima, so Levenberg-Marquardt
starts from a grid of them, all at once; each step is a least-squares one in which runs far off weigh less. The scatter
of the constants comes from the Bayesian bootstrap (Rubin, 1981): the same fit with random weights of the runs. It says
how far these runs determine the law, not if the law has the right form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import UserError, several
from fivefold.plan.advice.budget import FLOPS, Law

Array = NDArray[np.float64]
HUBER = 1e-3
"""Errors of log L up to here count by their squares, larger ones by their size."""
CONSTANTS = 5
FEWEST_RUNS, FEWEST_VALUES = CONSTANTS + 1, 3
"""Runs of a fit, and different sizes and numbers of tokens among them."""
FEW_RUNS = 10
SAMPLES = 300  # of the bootstrap
FIRST_ROUNDS, ROUNDS = 40, 150
MOST_ENDS = 8  # starts that go on after the first rounds
EXPONENTS = (0.1, 0.3, 0.6, 1.0, 1.6)  # of the grid of starts
FLOORS = (0.1, 0.5, 0.8, 0.95)  # E of the starts, as a share of the lowest loss
SMALLEST_EXPONENT, LARGEST_EXPONENT = 1e-3, 5.0
SMALLEST_FLOOR = 1e-3  # of E, as a share of the lowest loss


@dataclass(frozen=True)
class Run:
    """A finished run, as a fit sees it."""

    name: str
    parameters: float
    tokens: float
    loss: float

    @property
    def flops(self) -> float:
        return FLOPS * self.parameters * self.tokens


@dataclass(frozen=True)
class Fit:
    """A fitted law. samples: the laws of the bootstrap. residuals: log of measured over fitted loss, run by run."""

    law: Law
    samples: Sequence[Law]
    residuals: Sequence[float]
    notes: Sequence[str]

    @property
    def scatter(self) -> float:
        """Root mean square of the residuals, with the freedom that the constants take away."""
        free = max(1, len(self.residuals) - CONSTANTS)
        return float(np.sqrt(np.sum(np.square(self.residuals)) / free))

    def interval(self, value: Callable[[Law], float]) -> tuple[float, float]:
        """90% of the bootstrap's laws give a value in between."""
        low, high = np.quantile([value(law) for law in self.samples], (0.05, 0.95))
        return float(low), float(high)

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """`interval` of each of `Law.constants`."""
        return {
            name: self.interval(lambda law, name=name: law.constants[name]) for name in self.law.constants
        }

    def prediction(self, parameters: float, tokens: float) -> tuple[float, float, float]:
        """The loss of a run that was not fitted, and its 90% interval: of the laws, and of a run around its law."""
        random = np.random.default_rng(1)
        widened = np.sqrt(len(self.residuals) / max(1, len(self.residuals) - CONSTANTS))
        noise = np.exp(random.choice(self.residuals, len(self.samples)) * widened)
        losses = np.array([law.loss(parameters, tokens) for law in self.samples]) * noise
        low, high = np.quantile(losses, (0.05, 0.95))
        return self.law.loss(parameters, tokens), float(low), float(high)


def too_few(runs: Sequence[Run]) -> str:
    """Why these runs determine no law; "" if they do."""
    sizes, lengths = len({run.parameters for run in runs}), len({run.tokens for run in runs})
    if len(runs) >= FEWEST_RUNS and min(sizes, lengths) >= FEWEST_VALUES:
        return ""
    return (
        f"too few runs for a fit: {len(runs)} with {several(sizes, 'size')} and {several(lengths, 'number')} of "
        f"tokens. Its {CONSTANTS} constants need at least {FEWEST_RUNS} runs with {FEWEST_VALUES} sizes and "
        f"{FEWEST_VALUES} numbers of tokens"
    )


def fit(runs: Sequence[Run], samples: int = SAMPLES) -> Fit:
    """The law that fits these runs best. The same runs give the same fit.

    Raises:
        UserError: there are too few runs.
    """
    if why := too_few(runs):
        raise UserError(why)
    data = _Data.of(runs)
    found, errors = _descend(data, data.starts(), np.ones(len(runs)), FIRST_ROUNDS)
    found, errors = _descend(data, found[errors.argsort()[:MOST_ENDS]], np.ones(len(runs)), ROUNDS)
    best = found[errors.argmin()]
    weights = np.random.default_rng(0).dirichlet(np.ones(len(runs)), samples) * len(runs)
    again, _ = _descend(data, np.tile(best, (samples, 1)), weights, ROUNDS)
    law = data.law(best)
    residuals = [float(np.log(run.loss / law.loss(run.parameters, run.tokens))) for run in runs]
    made = Fit(law, [data.law(theta) for theta in again], residuals, ())
    return Fit(law, made.samples, residuals, _notes(made, runs))


def _notes(made: Fit, runs: Sequence[Run]) -> list[str]:
    """What a reader of the fit has to know."""
    notes = []
    if len(runs) < FEW_RUNS:
        notes.append(f"{len(runs)} runs for {CONSTANTS} constants: take the law as a sketch")
    low, high = made.intervals["E"]
    if low < high / 2:
        notes.append(
            f"E is hardly determined ({low:.2g} to {high:.2g}): these runs are far from the lowest loss"
        )
    for name in ("alpha", "beta"):
        low, high = made.intervals[name]
        if low <= SMALLEST_EXPONENT or high >= LARGEST_EXPONENT:
            notes.append(f"{name} is not determined by these runs")
    return notes


@dataclass(frozen=True)
class _Data:
    """Runs as log N, log D and log L, of which the first two are centred: then a and b hardly depend on exponents."""

    x: Array
    y: Array
    loss: Array
    centre: tuple[float, float]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> _Data:
        x, y, loss = (
            np.log([getattr(run, name) for run in runs]) for name in ("parameters", "tokens", "loss")
        )
        return cls(x - x.mean(), y - y.mean(), loss, (float(x.mean()), float(y.mean())))

    def starts(self) -> Array:
        """(starts, 5): exponents and E from a grid, A and B by least squares."""
        losses, found = np.exp(self.loss), []
        for alpha, beta, share in product(EXPONENTS, EXPONENTS, FLOORS):
            floor = share * losses.min()
            columns = np.stack([np.exp(-alpha * self.x), np.exp(-beta * self.y)], 1) / losses[:, None]
            sizes = np.linalg.lstsq(columns, (losses - floor) / losses, rcond=None)[0]
            a, b = np.log(np.maximum(sizes, 1e-3 * (losses.max() - floor)))
            found.append((np.log(floor), a, b, alpha, beta))
        return np.array(found)

    def law(self, theta: Array) -> Law:
        e, a, b, alpha, beta = (float(value) for value in theta)
        A, B = np.exp(a + alpha * self.centre[0]), np.exp(b + beta * self.centre[1])
        return Law(float(np.exp(e)), float(A), float(B), alpha, beta)


def _descend(data: _Data, theta: Array, weights: Array, rounds: int) -> tuple[Array, Array]:
    """Levenberg-Marquardt on each row of theta (K, 5), with weights (K, runs) or (runs). Returns theta and its errors
    (K)."""
    lowest = np.array([np.log(SMALLEST_FLOOR) + data.loss.min(), -50, -50, *(2 * [SMALLEST_EXPONENT])])
    highest = np.array([data.loss.min(), 50, 50, *(2 * [LARGEST_EXPONENT])])
    damping, eye = np.full(len(theta), 1e-2), np.eye(CONSTANTS)
    errors, slopes = _predict(data, theta)
    objective = _huber(errors, weights)
    for _ in range(rounds):
        pull = weights * np.minimum(1.0, HUBER / np.maximum(np.abs(errors), 1e-300))  # (K, runs)
        hessian = np.einsum("kni,kn,knj->kij", slopes, pull, slopes)
        gradient = np.einsum("kni,kn->ki", slopes, pull * errors)
        scale = np.einsum("kii->ki", hessian) + 1e-12
        damped = hessian + damping[:, None, None] * scale[:, :, None] * eye
        tried = np.clip(theta - np.linalg.solve(damped, gradient[:, :, None])[:, :, 0], lowest, highest)
        errors_tried, slopes_tried = _predict(data, tried)
        objective_tried = _huber(errors_tried, weights)
        better = objective_tried < objective
        theta = np.where(better[:, None], tried, theta)
        errors = np.where(better[:, None], errors_tried, errors)
        slopes = np.where(better[:, None, None], slopes_tried, slopes)
        objective = np.where(better, objective_tried, objective)
        damping = np.clip(np.where(better, damping / 3, damping * 4), 1e-9, 1e9)
    return theta, objective


def _predict(data: _Data, theta: Array) -> tuple[Array, Array]:
    """Errors of log L (K, runs), and their derivatives by the constants (K, runs, 5)."""
    e, a, b, alpha, beta = (theta[:, i, None] for i in range(CONSTANTS))
    terms = np.stack(np.broadcast_arrays(e, a - alpha * data.x, b - beta * data.y))  # (3, K, runs)
    top = terms.max(0)
    powers = np.exp(terms - top)
    total = powers.sum(0)
    of_e, of_a, of_b = powers / total
    slopes = np.stack([of_e, of_a, of_b, -of_a * data.x, -of_b * data.y], -1)
    return top + np.log(total) - data.loss, slopes


def _huber(errors: Array, weights: Array) -> Array:
    size = np.abs(errors)
    return (weights * np.where(size <= HUBER, errors**2 / 2, HUBER * (size - HUBER / 2))).sum(1)
