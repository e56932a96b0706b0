"""What came out of a sweep: the law, runs predicted by it, the best value of each varied field; as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fivefold.errors import UserError, did_you_mean
from fivefold.observe.format import duration, short_number
from fivefold.plan.advice.budget import FLOPS, Law
from fivefold.plan.advice.scaling_fit import Fit, Run, fit, too_few
from fivefold.recipe import sweep as table
from fivefold.recipe.sweep import Row, Sweep

SIZES = ("model.", "train.tokens", "train.steps", table.FLOPS)
"""Fields that the law has: sizes and lengths. The other ones get a curve each."""
SEED = "train.seed"
LARGEST, SIZE = "largest", "size"  # `--hold-out`
LEVELS = 5  # of isoFLOP curves
COUNTED = (
    "N: all parameters with embeddings, of experts those that a token uses; D: tokens trained on; C = 6 N D"
)


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
    law: Fit | None
    why: str
    held_out: Sequence[HeldOut]
    curves: Sequence[Curve]
    hold_out: str | None = None

    @property
    def sized(self) -> bool:
        """True if sizes or lengths vary, so that a law is expected."""
        return any(key.startswith(SIZES) for key in self.sweep.varied)

    @property
    def budgets(self) -> list[float]:
        """FLOPs for which the best size is predicted: within the runs, and ten times the largest."""
        flops = [run.flops for run in self.runs]
        return [*np.geomspace(min(flops), max(flops), 3).tolist(), 10 * max(flops)]

    def optima(self) -> list[dict[str, Any]]:
        """The best size for each budget, with its 90% interval. outside: N or D is not among those of the runs."""
        if self.law is None:
            return []
        sizes, lengths = [run.parameters for run in self.runs], [run.tokens for run in self.runs]
        found = []
        for flops in self.budgets:
            best = self.law.law.optimum(flops)
            low, high = self.law.interval(lambda law, C=flops: law.optimum(C).parameters)
            loss = self.law.law.loss(best.parameters, best.tokens)
            inside = min(sizes) <= best.parameters <= max(sizes)
            inside &= min(lengths) <= best.tokens <= max(lengths)
            ends = {"parameters_low": low, "parameters_high": high}
            found.append({"flops": flops, **asdict(best), **ends, "loss": loss, "outside": not inside})
        return found

    def as_json(self) -> dict[str, Any]:
        rows = [
            {"name": r.name, "status": r.status, "why": r.why, "settings": dict(r.settings), **r.figures}
            for r in self.sweep.rows
        ]
        curves = [{**vars(c), "best": c.best[0], "loss": c.best[1], "valley": c.valley} for c in self.curves]
        return {
            "runs": rows,
            "law": self._law(),
            "why_no_law": self.why,
            "held_out": [{**asdict(run), "error": run.error} for run in self.held_out],
            "optima": self.optima(),
            "curves": curves,
        }

    def _law(self) -> dict[str, Any] | None:
        if self.law is None:
            return None
        return {
            **self.law.law.constants,
            "interval90": self.law.intervals,
            "fitted_runs": [run.name for run in self.runs],
            "scatter": self.law.scatter,
            "counted": COUNTED,
            "notes": list(self.law.notes),
        }

    def text(self) -> str:
        """The results as lines for a terminal."""
        rows = self.sweep.rows
        lines = [f"{sum(row.status == table.FINISHED for row in rows)} of {len(rows)} runs are finished"]
        lines += [
            f"  {row.status}: {row.name}" + f" ({row.why})" * bool(row.why)
            for row in rows
            if row.status != table.FINISHED
        ]
        if usable := [row for row in rows if _loss(row) is not None]:
            best = min(usable, key=lambda row: _loss(row) or math.inf)
            lines.append(f"best          {best.name}: loss {_loss(best):.4f}")
        lines += [f"curve         {curve}" for curve in self.curves]
        lines += self._law_text() if self.law else [f"law           none: {self.why}"] * self.sized
        lines += [f"held out      {one}" for one in self.held_out]
        lines += [f"note          {note}" for note in notes(self)]
        return "\n".join(lines)

    def _law_text(self) -> list[str]:
        assert self.law is not None
        law, intervals = self.law.law, self.law.intervals
        spans = "; ".join(
            "{} {:.3g} to {:.3g}".format(name, *intervals[name]) for name in ("E", "alpha", "beta", "growth")
        )
        lines = [
            f"law           {law_text(law)}, from {len(self.runs)} runs (scatter {100 * self.law.scatter:.2f}%)",
            f"  90%         {spans.replace('growth', 'a')} (best N ~ C^{law.growth:.3f})",
            f"  counted     {COUNTED}",
        ]
        for one in self.optima():
            beyond = ", extrapolated" * one["outside"]
            low, high = (short_number(one[f"parameters_{end}"]) for end in ("low", "high"))
            lines.append(
                f"  best for    {one['flops']:.2e} FLOPs: N {short_number(one['parameters'])} (90%: {low} to {high}), "
                f"D {short_number(one['tokens'])}, loss {one['loss']:.3f}{beyond}"
            )
        return lines


def law_text(law: Law) -> str:
    return f"L(N, D) = {law.E:.3f} + {law.A:.4g} / N^{law.alpha:.3f} + {law.B:.4g} / D^{law.beta:.3f}"


def notes(found: Results) -> list[str]:
    """What a reader of the results has to know."""
    said = list(found.law.notes) if found.law else []
    if bad := [r.name for r in found.sweep.rows if r.status == table.FINISHED and _loss(r) is None]:
        said.append(f"left out, because the loss is not finite: {', '.join(bad)}")
    if found.hold_out and found.law and not found.held_out:
        said.append(
            f"{found.hold_out} is not held out: it is not finished, or not the best run of its N and D"
        )
    most = max((row.figures.get("epochs") or 0 for row in found.sweep.rows), default=0)
    if most > 1:
        said.append(f"runs see the data up to {most:.3g} times; the law is for data that is seen once")
    return said


def results(sweep: Sweep, hold_out: str | None = None) -> Results:
    """Fits what is finished. hold_out: the runs to predict instead (`--hold-out`).

    Raises:
        UserError: there is no run of that name.
    """
    check_hold_out(sweep, hold_out)
    runs = _runs(sweep.rows)
    held = _held(runs, hold_out)
    fitted = [run for run in runs if run not in held]
    why = too_few(fitted)
    law = None if why else fit(fitted)
    predicted = [HeldOut(r.name, r.loss, *law.prediction(r.parameters, r.tokens)) for r in held if law]
    return Results(sweep, fitted, law, why, predicted, curves(sweep), hold_out)


def check_hold_out(sweep: Sweep, hold_out: str | None) -> None:
    names = [row.name for row in sweep.rows]
    if hold_out is not None and hold_out not in (LARGEST, SIZE, *names):
        near = did_you_mean(hold_out, names)
        raise UserError(f"--hold-out {hold_out}: must be {LARGEST}, {SIZE} or the name of a run{near}")


def _held(runs: Sequence[Run], hold_out: str | None) -> list[Run]:
    if hold_out is None or not runs:
        return []
    if hold_out == LARGEST:
        return [max(runs, key=lambda run: run.flops)]
    if hold_out == SIZE:
        return [run for run in runs if run.parameters == max(run.parameters for run in runs)]
    return [run for run in runs if run.name == hold_out]


def _runs(rows: Sequence[Row]) -> list[Run]:
    """The runs to fit: of those with the same N, D and seed the best, whatever else was varied."""
    best: dict[tuple[float, float, str], Run] = {}
    for row in rows:
        if (loss := _loss(row)) is None:
            continue
        N, D = row.figures["parameters"], row.figures["tokens"]
        key = N, D, row.settings.get(SEED, "")
        if key not in best or loss < best[key].loss:
            best[key] = Run(row.name, N, D, loss)
    return list(best.values())


def _loss(row: Row) -> float | None:
    """The loss of a finished run: on validation data, if there are any. None if it is not a positive number."""
    loss = row.figures.get("val_loss", row.figures.get("loss"))
    fine = row.status == table.FINISHED and isinstance(loss, int | float) and 0 < loss < math.inf
    return float(loss) if fine else None  # type: ignore[arg-type]


def curves(sweep: Sweep) -> list[Curve]:
    """A curve for each varied field with numbers as values, and each setting of the others."""
    found = []
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
                found.append(
                    Curve(key, _label(dict(rest), points[0][2], sweep), [(x, y) for x, y, _ in points])
                )
    return found


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _label(rest: Mapping[str, str], row: Row, sweep: Sweep) -> str:
    """What a curve's runs have in common, by N and D where sizes and lengths vary."""
    varied = [key for key in sweep.varied if key in rest]
    words = []
    if any(key.startswith(("model.", table.FLOPS)) for key in varied):
        words.append(f"N {short_number(row.figures['parameters'])}")
    if any(key.startswith(SIZES[1:]) for key in varied):
        words.append(f"D {short_number(row.figures['tokens'])}")
    words += [f"{key.partition('.')[2]} {rest[key]}" for key in varied if not key.startswith(SIZES)]
    return ", ".join(words)


def iso_flops(found: Results) -> list[tuple[float, list[tuple[float, float]]]]:
    """(FLOPs C, [(N, loss)]) of a few budgets: each size at D = C / (6 N), interpolated between its own runs in log
    loss over log D. A size that was not trained for so few or so many tokens is left out."""
    sizes: dict[float, list[tuple[float, float]]] = {}
    for run in sorted(found.runs, key=lambda run: run.tokens):
        sizes.setdefault(run.parameters, []).append((run.tokens, run.loss))
    exact = {float(row.settings[table.FLOPS]) for row in found.sweep.rows if table.FLOPS in row.settings}
    flops = [run.flops for run in found.runs]
    levels = sorted(exact)
    if flops and not exact:
        levels = np.geomspace(min(flops), max(flops), LEVELS + 2)[1:-1].tolist()
    made = []
    for level in levels:
        points = []
        for N, runs in sorted(sizes.items()):
            tokens, losses = np.array(runs).T
            D = level / (FLOPS * N)
            if tokens[0] * 0.99 <= D <= tokens[-1] * 1.01:  # whole steps
                points.append((N, float(np.exp(np.interp(np.log(D), np.log(tokens), np.log(losses))))))
        if len(points) > 1:
            made.append((level, points))
    return made


def rows_text(sweep: Sweep) -> str:
    """A line per run."""
    lines = [f"{'run':32} {'N':>8} {'D':>8} {'loss':>8} {'tokens/s':>9} {'time':>7}"]
    for row in sweep.rows:
        f, loss = row.figures, _loss(row)
        cells = [
            short_number(f[key]) if f.get(key) else "" for key in ("parameters", "tokens", "tokens_per_s")
        ]
        time = duration(f["train_s"]) if f.get("train_s") else ""
        shown = f"{loss:.4f}" if loss is not None else row.status
        lines.append(f"{row.name:32} {cells[0]:>8} {cells[1]:>8} {shown:>8} {cells[2]:>9} {time:>7}")
    return "\n".join(lines)
