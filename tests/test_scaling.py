"""Scaling laws: the published ones, and fits that find the law that made the runs, or say that they cannot."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest
from commands import REPO

from fivefold.errors import UserError
from fivefold.recipe.sweep import FINISHED, Row, Sweep
from fivefold_plan.advice.budget import BESIROGLU, FLOPS, HOFFMANN, Law
from fivefold_plan.advice.scaling import Run, fit, iso_flops, results

SIZES, LENGTHS = (1e7, 4e7, 1.6e8, 6.4e8), (1e9, 4e9, 1.6e10, 6.4e10)


def runs_of(law: Law, noise: float = 0.0, sizes: Sequence[float] = SIZES, seed: int = 1) -> list[Run]:
    """Runs whose losses follow a law, times noise."""
    made = random.Random(seed)
    return [
        Run(f"{N:g}-{D:g}", N, D, law.loss(N, D) * (1 + noise * made.gauss(0, 1)))
        for N in sizes
        for D in LENGTHS
    ]


def sweep_of(runs: Sequence[Run], keys: Sequence[dict[str, str]] = ()) -> Sweep:
    rows = [
        Row(
            run.name,
            {"model.dim": f"{run.parameters:g}", "train.tokens": f"{run.tokens:g}"}
            | (keys[i] if keys else {}),
            FINISHED,
            figures={"parameters": run.parameters, "tokens": run.tokens, "val_loss": run.loss},
        )
        for i, run in enumerate(runs)
    ]
    return Sweep("quickstart", [], None, [], rows, "")


def test_published_laws() -> None:
    """Chinchilla's and Gopher's losses by the law; the exponent of the best size that Besiroglu et al. state."""
    assert HOFFMANN.loss(70e9, 1.4e12) == pytest.approx(1.94, abs=0.01)
    assert HOFFMANN.loss(280e9, 300e9) == pytest.approx(1.99, abs=0.01)
    assert BESIROGLU.growth == pytest.approx(0.513, abs=0.001)


@pytest.mark.parametrize("law", [HOFFMANN, BESIROGLU, Law(2.5, 30.0, 900.0, 0.25, 0.5)])
def test_the_optimum_is_the_lowest_loss_of_its_budget(law: Law) -> None:
    best = law.optimum(1e21)
    assert FLOPS * best.parameters * best.tokens == pytest.approx(1e21)
    for other in (0.9, 1.1):
        assert law.loss(best.parameters * other, best.tokens / other) > law.loss(best.parameters, best.tokens)


@pytest.mark.parametrize("law", [HOFFMANN, BESIROGLU, Law(0.6, 8.0, 60.0, 0.2, 0.3)])
def test_a_fit_finds_the_law_of_exact_runs(law: Law) -> None:
    found = fit(runs_of(law), samples=20)
    for name in ("E", "A", "B", "alpha", "beta"):
        assert getattr(found.law, name) == pytest.approx(getattr(law, name), rel=1e-4)
    assert found.scatter < 1e-6


def test_one_bad_run_moves_the_law_little() -> None:
    """What the Huber loss is for."""
    runs = runs_of(HOFFMANN)
    bad = runs[5]
    runs[5] = Run(bad.name, bad.parameters, bad.tokens, bad.loss * 1.3)
    assert fit(runs, samples=20).law.alpha == pytest.approx(HOFFMANN.alpha, abs=0.01)


def test_intervals_hold_the_law_and_grow_with_the_noise() -> None:
    """Nine in ten 90% intervals hold the true exponent, about."""
    spans = [
        fit(runs_of(HOFFMANN, 0.005, seed=seed), samples=60).interval(lambda law: law.alpha)
        for seed in range(8)
    ]
    assert sum(low <= HOFFMANN.alpha <= high for low, high in spans) >= 6
    low, high = fit(runs_of(HOFFMANN, 0.02, seed=0), samples=60).interval(lambda law: law.alpha)
    assert high - low > 2 * (spans[0][1] - spans[0][0])


def test_a_held_out_run_is_predicted_with_its_interval() -> None:
    runs = runs_of(HOFFMANN, 0.002)
    found = results(sweep_of(runs), "largest")
    (held,) = found.held_out
    assert held.name == max(runs, key=lambda run: run.flops).name
    assert held.name not in [run.name for run in found.runs]
    assert abs(held.error) < 0.01
    assert held.low < held.predicted < held.high
    assert f"{100 * held.error:+.2f}%" in found.text()
    assert len(results(sweep_of(runs), "size").held_out) == len(LENGTHS)
    with pytest.raises(
        UserError, match=r"--hold-out 1e\+7-1e\+9: must be largest, size or the name of a run"
    ):
        results(sweep_of(runs), "1e+7-1e+9")


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        (runs_of(HOFFMANN, sizes=SIZES[:2]), "8 with 2 size"),
        (runs_of(HOFFMANN)[:5], "5 with 2 size"),
        ([], "0 with 0 size"),
    ],
)
def test_too_few_runs_are_said(runs: list[Run], why: str) -> None:
    with pytest.raises(UserError, match=f"too few runs for a fit: {why}"):
        fit(runs)
    found = results(sweep_of(runs), "largest")
    assert found.fit is None
    assert found.as_json()["law"] is None
    assert not found.held_out
    if runs:
        assert f"law           none: too few runs for a fit: {len(runs) - 1} with" in found.text()


def test_what_runs_do_not_determine_is_said() -> None:
    far = Law(0.001, 400.0, 400.0, 0.3, 0.3)  # its floor is nowhere near
    notes = fit(runs_of(far, 0.003, SIZES[:3]), samples=50).notes
    assert any("E is hardly determined" in note for note in notes)
    few = [run for run in runs_of(HOFFMANN) if run.tokens < 5e10][:9]
    assert any("9 runs for 5 constants" in note for note in fit(few, samples=20).notes)


def test_iso_flops_interpolate_between_a_size_s_own_runs() -> None:
    law = Law(0.0, 0.0, 50.0, 1.0, 0.25)  # log L is linear in log D: interpolation is exact
    found = iso_flops(results(sweep_of(runs_of(law))))
    assert len(found) == 5
    for flops, points in found:
        assert len(points) > 1
        for N, loss in points:
            assert min(LENGTHS) * 0.98 <= flops / (FLOPS * N) <= max(LENGTHS) * 1.02
            assert loss == pytest.approx(law.loss(N, flops / (FLOPS * N)), rel=1e-9)


def test_the_best_rate_of_each_size_is_fitted_and_marked() -> None:
    """Three rates per run: a parabola in log rate with its lowest point at 3e-3."""
    runs, keys = [], []
    for run in runs_of(HOFFMANN):
        for rate, worse in (("1e-3", 1.04), ("2e-3", 1.005), ("8e-3", 1.03)):
            runs.append(Run(f"{run.name}-{rate}", run.parameters, run.tokens, run.loss * worse))
            keys.append({"optim.lr": rate})
    found = results(sweep_of(runs, keys))
    assert [run.name[-4:] for run in found.runs] == ["2e-3"] * 16
    assert len(found.curves) == 16
    curve = found.curves[0]
    assert (curve.key, curve.label) == ("optim.lr", "N 10M, D 1B")
    assert curve.best == (2e-3, runs[1].loss)
    assert curve.valley
    assert 2e-3 < curve.valley < 4e-3
    edge = results(
        sweep_of(
            [r for r in runs if not r.name.endswith("1e-3")], [k for k in keys if k != {"optim.lr": "1e-3"}]
        )
    )
    assert edge.curves[0].valley is None
    assert "it is the lowest value tried" in str(edge.curves[0])


def test_the_measured_example_is_what_the_docs_say() -> None:
    """The fit of the runs in benchmarks/results gives the predictions that stand there and in docs/sweeps.md."""
    saved = json.loads((REPO / "benchmarks/results/scaling.json").read_text())
    rows = [Row(r["name"], r["settings"], r["status"], figures=r) for r in saved["law"]["runs"]]
    docs = (REPO / "docs/sweeps.md").read_text()
    for name, wanted in saved["held_out"].items():
        found = results(Sweep("quickstart", [], None, [], rows, ""), name).held_out
        for held, row in zip(found, wanted, strict=True):
            assert (held.name, held.measured) == (row["name"], row["measured"])
            assert held.predicted == pytest.approx(row["predicted"], abs=1e-4)
            figures = f"| {held.predicted:.3f} | {held.low:.3f} | {held.high:.3f} | {held.measured:.3f} | "
            assert f"{figures}{100 * held.error:+.1f}% |" in docs
