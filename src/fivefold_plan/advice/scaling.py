"""A scaling law fitted to the runs of a sweep (arXiv 2203.15556, approach 3), runs predicted by it, the best value of
each varied field; as text and as JSON.

The constants minimise the Huber loss of log L over all runs, by damped Gauss-Newton steps from a grid of exponents. The
scatter of the constants comes from the Bayesian bootstrap (Rubin, 1981): the same fit with random weights of the runs.
It says how far these runs determine the law, not if the law has the right form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import UserError, did_you_mean, several
from fivefold.observe.format import duration, short_number
from fivefold.recipe import FLOPS
from fivefold.recipe import sweep as table
from fivefold.recipe.sweep import Row, Sweep
from fivefold_plan.advice.budget import Law

Array = NDArray[np.float64]
HUBER = 1e-3
"""Errors of log L up to here count by their squares, larger ones by their size."""
CONSTANTS = 5
FEWEST_RUNS, FEWEST_VALUES = CONSTANTS + 1, 3
"""Runs of a fit, and different sizes and numbers of tokens among them."""
FEW_RUNS = 10
SAMPLES = 300  # of the bootstrap
ROUNDS = 150
EXPONENTS = (0.1, 0.3, 0.6, 1.0, 1.6)  # of the grid of starts
SMALLEST_EXPONENT, LARGEST_EXPONENT = 1e-3, 5.0
SMALLEST_FLOOR = 1e-3  # of E, as a share of the lowest loss
SIZES = ("model.", "train.tokens", "train.steps", table.FLOPS)
"""Fields that the law has: sizes and lengths. The other ones get a curve each."""
SEED = "train.seed"
LARGEST, SIZE = "largest", "size"  # `--hold-out`
LEVELS = 5  # of isoFLOP curves
COUNTED = (
    "N: all parameters with embeddings, of experts those that a token uses; D: tokens trained on; C = 6 N D"
)


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

    @property
    def notes(self) -> list[str]:
        """What a reader of the fit has to know."""
        notes, intervals = [], self.intervals
        if (runs := len(self.residuals)) < FEW_RUNS:
            notes.append(f"{runs} runs for {CONSTANTS} constants: take the law as a sketch")
        low, high = intervals["E"]
        if low < high / 2:
            notes.append(
                f"E is hardly determined ({low:.2g} to {high:.2g}): these runs are far from the lowest loss"
            )
        for name in ("alpha", "beta"):
            low, high = intervals[name]
            if low <= SMALLEST_EXPONENT or high >= LARGEST_EXPONENT:
                notes.append(f"{name} is not determined by these runs")
        return notes

    def prediction(self, run: Run) -> HeldOut:
        """The loss of a run that was not fitted, and its 90% interval: of the laws, and of a run around its law."""
        random = np.random.default_rng(1)
        widened = np.sqrt(len(self.residuals) / max(1, len(self.residuals) - CONSTANTS))
        noise = np.exp(random.choice(self.residuals, len(self.samples)) * widened)
        losses = np.array([law.loss(run.parameters, run.tokens) for law in self.samples]) * noise
        low, high = np.quantile(losses, (0.05, 0.95))
        return HeldOut(run.name, run.loss, self.law.loss(run.parameters, run.tokens), float(low), float(high))


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
    """The law that fits these runs best. The same runs give the same fit. Raises UserError: there are too few runs."""
    if why := too_few(runs):
        raise UserError(why)
    names = "parameters", "tokens", "loss"
    N, D, losses = (np.array([getattr(run, name) for run in runs]) for name in names)
    centre_x, centre_y = np.log(N).mean(), np.log(D).mean()
    # centred, so that A and B hardly depend on the exponents
    x, y = np.log(N) - centre_x, np.log(D) - centre_y
    starts = []
    for alpha, beta in ((alpha, beta) for alpha in EXPONENTS for beta in EXPONENTS):
        columns = np.stack([np.ones_like(x), np.exp(-alpha * x), np.exp(-beta * y)], 1) / losses[:, None]
        starts.append([*np.linalg.lstsq(columns, np.ones(len(runs)), rcond=None)[0], alpha, beta])
    found, errors = _descend(x, y, losses, np.array(starts), np.ones((len(starts), len(runs))))
    weights = np.random.default_rng(0).dirichlet(np.ones(len(runs)), samples) * len(runs)
    again, _ = _descend(x, y, losses, np.tile(found[errors.argmin()], (samples, 1)), weights)
    law, *others = (
        Law(E, float(A * np.exp(alpha * centre_x)), float(B * np.exp(beta * centre_y)), alpha, beta)
        for E, A, B, alpha, beta in [found[errors.argmin()].tolist(), *again.tolist()]
    )
    return Fit(law, others, [math.log(run.loss / law.loss(run.parameters, run.tokens)) for run in runs])


def _descend(x: Array, y: Array, losses: Array, starts: Array, weights: Array) -> tuple[Array, Array]:
    """(E, A, B, alpha, beta by row, their Huber losses) where damped Gauss-Newton steps from each start end. Runs that
    are far off weigh less in a step. weights: (starts, runs)."""
    smallest = SMALLEST_FLOOR * losses.min()
    lowest = np.array([smallest, 1e-9 * smallest, 1e-9 * smallest, SMALLEST_EXPONENT, SMALLEST_EXPONENT])
    highest = np.array([losses.min(), np.inf, np.inf, LARGEST_EXPONENT, LARGEST_EXPONENT])
    tried = np.clip(starts, lowest, highest)
    best, objective, damping = tried.copy(), np.full(len(starts), np.inf), np.full(len(starts), 1e-2)
    hessian, gradient = np.empty((len(starts), CONSTANTS, CONSTANTS)), np.empty((len(starts), CONSTANTS))
    for _ in range(ROUNDS):
        E, A, B, alpha, beta = (column[:, None] for column in tried.T)
        by_size, by_length = np.exp(-alpha * x), np.exp(-beta * y)  # (starts, runs)
        predicted = E + A * by_size + B * by_length
        error = np.log(predicted / losses)
        size = np.abs(error)
        now = (weights * np.where(size <= HUBER, size**2 / 2, HUBER * (size - HUBER / 2))).sum(1)
        better = now < objective
        best[better], objective[better] = tried[better], now[better]
        slopes = np.stack([np.ones_like(error), by_size, by_length, -A * x * by_size, -B * y * by_length], -1)
        slopes /= predicted[:, :, None]
        pull = weights * np.minimum(1.0, HUBER / np.maximum(size, 1e-300))
        hessian[better] = np.einsum("kni,kn,knj->kij", slopes, pull, slopes)[better]
        gradient[better] = np.einsum("kni,kn->ki", slopes, pull * error)[better]
        damping = np.clip(np.where(better, damping / 3, damping * 4), 1e-9, 1e9)
        scale = damping[:, None] * (np.einsum("kii->ki", hessian) + 1e-12)
        steps = np.linalg.solve(hessian + scale[:, :, None] * np.eye(CONSTANTS), gradient[:, :, None])
        tried = np.clip(best - steps[:, :, 0], lowest, highest)
    return best, objective


@dataclass(frozen=True)
class HeldOut:
    """A run that the fit has not seen, as the law predicts it. low, high: 90%. error: predicted over measured,
    less 1."""

    name: str
    measured: float
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        where = "inside" if self.low <= self.measured <= self.high else "outside"
        return (
            f"{self.name}: predicted {self.predicted:.4f} (90%: {self.low:.4f} to {self.high:.4f}), measured "
            f"{self.measured:.4f}: {100 * self.error:+.2f}%, {where} the interval"
        )


@dataclass(frozen=True)
class Curve:
    """Losses over the values of one field, all else equal. valley: the lowest point of a parabola through the best
    value and its neighbours, over log values; None where the best value is the first or the last."""

    key: str
    label: str
    points: Sequence[tuple[float, float]]

    @property
    def best(self) -> tuple[float, float]:
        return min(self.points, key=lambda point: point[1])

    @property
    def edge(self) -> str:
        """Where the best value lies if none was tried beyond it: lowest or highest; else ""."""
        values = [value for value, _ in self.points]
        return {values[0]: "lowest", values[-1]: "highest"}.get(self.best[0], "")

    @property
    def valley(self) -> float | None:
        at = self.points.index(self.best)
        if self.edge or self.points[at - 1][0] <= 0:
            return None
        x, y = zip(*self.points[at - 1 : at + 2], strict=True)
        curved, slope, _ = np.polyfit(np.log(x), y, 2)
        return float(np.exp(-slope / (2 * curved))) if curved > 0 else None

    def __str__(self) -> str:
        value, loss = self.best
        where = f"; it is the {self.edge} value tried: try beyond it" if self.edge else ""
        where = f"; a parabola has its lowest point at {self.valley:.3g}" if self.valley else where
        return f"{self.label + ': ' if self.label else ''}best {self.key} = {value:g}, loss {loss:.4f}{where}"


@dataclass(frozen=True)
class Results:
    """A sweep with its results. runs: those that are fitted. why: no law was fitted."""

    sweep: Sweep
    runs: Sequence[Run]
    fit: Fit | None
    why: str
    held_out: Sequence[HeldOut]
    curves: Sequence[Curve]
    hold_out: str | None = None

    @property
    def sized(self) -> bool:
        """True if sizes or lengths vary, so that a law is expected."""
        return any(key.startswith(SIZES) for key in self.sweep.varied)

    def optima(self) -> list[dict[str, Any]]:
        """The best size for budgets of FLOPs within the runs and ten times the largest, with its 90% interval.
        outside: N or D is not among those of the runs."""
        if self.fit is None:
            return []
        points = ((run.parameters, run.tokens, run.flops) for run in self.runs)
        sizes, lengths, flops = zip(*points, strict=True)
        optima = []
        for budget in (*np.geomspace(min(flops), max(flops), 3).tolist(), 10 * max(flops)):
            best = self.fit.law.optimum(budget)
            low, high = self.fit.interval(lambda law, C=budget: law.optimum(C).parameters)
            inside = min(sizes) <= best.parameters <= max(sizes)
            inside = inside and min(lengths) <= best.tokens <= max(lengths)
            ends = {"parameters_low": low, "parameters_high": high}
            loss = self.fit.law.loss(best.parameters, best.tokens)
            optima.append({"flops": budget, **asdict(best), **ends, "loss": loss, "outside": not inside})
        return optima

    def as_json(self) -> dict[str, Any]:
        rows = [
            {"name": r.name, "status": r.status, "why": r.why, "settings": dict(r.settings), **r.figures}
            for r in self.sweep.rows
        ]
        law = self.fit and {
            **self.fit.law.constants,
            "interval90": self.fit.intervals,
            "fitted_runs": [run.name for run in self.runs],
            "scatter": self.fit.scatter,
            "counted": COUNTED,
            "notes": self.fit.notes,
        }
        curves = [{**vars(c), "best": c.best[0], "loss": c.best[1], "valley": c.valley} for c in self.curves]
        return {
            "runs": rows,
            "law": law,
            "why_no_law": self.why,
            "held_out": [{**asdict(run), "error": run.error} for run in self.held_out],
            "optima": self.optima(),
            "curves": curves,
        }

    def text(self) -> str:
        rows = self.sweep.rows
        lines = [f"{sum(row.status == table.FINISHED for row in rows)} of {len(rows)} runs are finished"]
        for row in rows:
            if row.status != table.FINISHED:
                lines.append(f"  {row.status}: {row.name}" + f" ({row.why})" * bool(row.why))
        if losses := {row.name: loss for row in rows if (loss := _loss(row)) is not None}:
            best = min(losses, key=lambda name: losses[name])
            lines.append(f"best          {best}: loss {losses[best]:.4f}")
        lines += [f"curve         {curve}" for curve in self.curves]
        lines += self._law_text(self.fit) if self.fit else [f"law           none: {self.why}"] * self.sized
        lines += [f"held out      {run}" for run in self.held_out]
        lines += [f"note          {note}" for note in self.notes]
        return "\n".join(lines)

    def _law_text(self, fit: Fit) -> list[str]:
        law, intervals = fit.law, fit.intervals
        spans = "; ".join(
            "{} {:.3g} to {:.3g}".format(name, *intervals[name]) for name in ("E", "alpha", "beta", "growth")
        )
        formula = f"{law.E:.3f} + {law.A:.4g} / N^{law.alpha:.3f} + {law.B:.4g} / D^{law.beta:.3f}"
        lines = [
            f"law           L(N, D) = {formula}, from {len(self.runs)} runs (scatter {100 * fit.scatter:.2f}%)",
            f"  90%         {spans.replace('growth', 'a')} (best N ~ C^{law.growth:.3f})",
            f"  counted     {COUNTED}",
        ]
        for best in self.optima():
            low, high = (short_number(best[f"parameters_{end}"]) for end in ("low", "high"))
            beyond = ", extrapolated" * best["outside"]
            lines.append(
                f"  best for    {best['flops']:.2e} FLOPs: N {short_number(best['parameters'])} (90%: {low} to "
                f"{high}), D {short_number(best['tokens'])}, loss {best['loss']:.3f}{beyond}"
            )
        return lines

    @property
    def notes(self) -> list[str]:
        """What a reader of the results has to know."""
        notes = [*self.fit.notes] if self.fit else []
        if bad := [r.name for r in self.sweep.rows if r.status == table.FINISHED and _loss(r) is None]:
            notes.append(f"left out, because the loss is not finite: {', '.join(bad)}")
        if self.hold_out and self.fit and not self.held_out:
            notes.append(
                f"{self.hold_out} is not held out: it is not finished, or not the best run of its N and D"
            )
        most = max((row.figures.get("epochs") or 0 for row in self.sweep.rows), default=0)
        if most > 1:
            notes.append(f"runs see the data up to {most:.3g} times; the law is for data that is seen once")
        return notes


def results(sweep: Sweep, hold_out: str | None = None) -> Results:
    """Fits what is finished: of the runs with the same N, D and seed the best, whatever else was varied. hold_out: the
    runs to predict instead (`--hold-out`). Raises UserError: there is no run of that name."""
    check_hold_out(sweep, hold_out)
    best: dict[tuple[float, float, str], Run] = {}
    for row in sweep.rows:
        if (loss := _loss(row)) is not None:
            N, D = row.figures["parameters"], row.figures["tokens"]
            key = N, D, row.settings.get(SEED, "")
            if key not in best or loss < best[key].loss:
                best[key] = Run(row.name, N, D, loss)
    runs = list(best.values())
    held = [run for run in runs if run.name == hold_out]
    if hold_out == LARGEST and runs:
        held = [max(runs, key=lambda run: run.flops)]
    elif hold_out == SIZE:
        held = [run for run in runs if run.parameters == max(run.parameters for run in runs)]
    fitted = [run for run in runs if run not in held]
    why = too_few(fitted)
    law = None if why else fit(fitted)
    predicted = [law.prediction(run) for run in held if law]
    return Results(sweep, fitted, law, why, predicted, _curves(sweep), hold_out)


def check_hold_out(sweep: Sweep, hold_out: str | None) -> None:
    names = [row.name for row in sweep.rows]
    if hold_out is not None and hold_out not in (LARGEST, SIZE, *names):
        near = did_you_mean(hold_out, names)
        raise UserError(f"--hold-out {hold_out}: must be {LARGEST}, {SIZE} or the name of a run{near}")


def _loss(row: Row) -> float | None:
    """The loss of a finished run: on validation data, if there are any. None if it is not a positive number."""
    loss = row.figures.get("val_loss", row.figures.get("loss"))
    fine = row.status == table.FINISHED and isinstance(loss, int | float) and 0 < loss < math.inf
    return float(loss) if fine else None  # type: ignore[arg-type]


def _curves(sweep: Sweep) -> list[Curve]:
    """A curve for each varied field with numbers as values, and each setting of the others."""
    curves = []
    for key in sweep.varied:
        if key.startswith(SIZES) or key == SEED:
            continue
        lines: dict[tuple[tuple[str, str], ...], list[tuple[float, float, Row]]] = {}
        for row in sweep.rows:
            value, loss = _number(row.settings.get(key)), _loss(row)
            if value is not None and loss is not None:
                rest = tuple((k, v) for k, v in row.settings.items() if k != key)
                lines.setdefault(rest, []).append((value, loss, row))
        for rest, points in lines.items():
            if len(points) > 1:
                points.sort(key=lambda point: point[0])
                label = _label(dict(rest), points[0][2], sweep)
                curves.append(Curve(key, label, [(x, y) for x, y, _ in points]))
    return curves


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _label(rest: Mapping[str, str], row: Row, sweep: Sweep) -> str:
    """What a curve's runs have in common, by N and D where sizes and lengths vary."""
    varied = [key for key in sweep.varied if key in rest]
    parts = []
    if any(key.startswith(("model.", table.FLOPS)) for key in varied):
        parts.append(f"N {short_number(row.figures['parameters'])}")
    if any(key.startswith(SIZES[1:]) for key in varied):
        parts.append(f"D {short_number(row.figures['tokens'])}")
    parts += [f"{key.partition('.')[2]} {rest[key]}" for key in varied if not key.startswith(SIZES)]
    return ", ".join(parts)


def iso_flops(swept: Results) -> list[tuple[float, list[tuple[float, float]]]]:
    """(FLOPs C, [(N, loss)]) of a few budgets: each size at D = C / (6 N), interpolated between its own runs in log
    loss over log D. A size that was not trained for so few or so many tokens is left out."""
    sizes: dict[float, list[tuple[float, float]]] = {}
    for run in sorted(swept.runs, key=lambda run: run.tokens):
        sizes.setdefault(run.parameters, []).append((run.tokens, run.loss))
    levels = sorted({float(r.settings[table.FLOPS]) for r in swept.sweep.rows if table.FLOPS in r.settings})
    flops = [run.flops for run in swept.runs]
    if flops and not levels:
        levels = np.geomspace(min(flops), max(flops), LEVELS + 2)[1:-1].tolist()
    curves = []
    for level in levels:
        points = []
        for N, runs in sorted(sizes.items()):
            tokens, losses = np.array(runs).T
            D = level / (FLOPS * N)
            if tokens[0] * 0.99 <= D <= tokens[-1] * 1.01:  # whole steps
                points.append((N, float(np.exp(np.interp(np.log(D), np.log(tokens), np.log(losses))))))
        if len(points) > 1:
            curves.append((level, points))
    return curves


def rows_text(sweep: Sweep) -> str:
    """A line per run."""
    lines = [f"{'run':32} {'N':>8} {'D':>8} {'loss':>8} {'tokens/s':>9} {'time':>7}"]
    for row in sweep.rows:
        f, loss = row.figures, _loss(row)
        keys = "parameters", "tokens", "tokens_per_s"
        N, D, speed = (short_number(f[key]) if f.get(key) else "" for key in keys)
        time = duration(f["train_s"]) if f.get("train_s") else ""
        shown = f"{loss:.4f}" if loss is not None else row.status
        lines.append(f"{row.name:32} {N:>8} {D:>8} {shown:>8} {speed:>9} {time:>7}")
    return "\n".join(lines)
