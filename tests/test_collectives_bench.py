"""`fivefold bench collectives`: the fit, and a small measurement whose table is saved and used."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.bench.collectives import fitted
from fivefold.cli.main import main
from fivefold.plan.topology import of_fit
from fivefold.schedules.collectives import build
from fivefold.schedules.collectives.cost import simulate


def points(alpha: float, beta: float) -> list[list[float]]:
    return [[size, alpha + beta * size] for size in (1e3, 1e5, 1e6, 4e6)]


@pytest.mark.parametrize(("alpha", "bus_alpha"), [(30e-6, 0.0), (20e-6, 10e-6)])
@pytest.mark.parametrize("shared", [1.0, 4.0])
def test_the_fit_finds_what_messages_cost(alpha: float, bus_alpha: float, shared: float) -> None:
    """And the simulation with it gives the messages back. shared: how much slower 4 messages at once are than one."""
    beta = 1 / 2e9
    pair, ring = points(alpha + bus_alpha, beta), points(alpha + 4 * bus_alpha, shared * beta)
    fit = fitted(pair, ring, 4)
    assert fit["alpha"] == pytest.approx(alpha)
    assert fit["bus_alpha"] == pytest.approx(bus_alpha, abs=1e-12)
    assert fit["beta"] == pytest.approx(beta)
    assert fit["bus_beta"] == pytest.approx(shared * beta / 4)
    topology = of_fit(fit | {"gamma": 0.0}, 4)
    turn = simulate(build("all_gather", "ring", 4), topology, 4e6).seconds / 3
    assert turn == pytest.approx(alpha + max(shared * beta * 1e6 + 4 * bus_alpha, beta * 1e6), rel=0.02)


def test_a_measurement_is_saved_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path))
    words = ["bench", "collectives", "--ranks", "2", "--sizes", "4K", "--json"]
    done = subprocess.run([sys.executable, "-m", "fivefold.cli.main", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"alpha", "beta", "bus_alpha", "bus_beta", "gamma"} == set(found["fit"])
    assert all(value >= 0 for value in found["fit"].values())
    times = found["seconds"]["2"]["4096"]
    assert set(times) == {"library", *found["predicted"]["2"]["4096"]}
    assert found["best"]["2"]["4096"] == min(times, key=times.get)
    with pytest.raises(SystemExit):
        main(["collectives", "--ranks", "2", "--size", "4K", "--topology", "local", "--json"])
    local = json.loads(capsys.readouterr().out)
    ring = next(row for row in local["algorithms"] if row["name"] == "ring")
    assert ring["seconds"] == pytest.approx(found["predicted"]["2"]["4096"]["ring"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "1"], "--ranks: 1 is not possible; must be at least 2 and at most 64"),
        (["--sizes", "4K,much"], "--sizes: 'much' is not a size"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "collectives", *words])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
