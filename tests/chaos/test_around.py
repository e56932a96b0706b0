"""What may happen around a run: it goes on, or goes on when it is started again, with the same bits."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import elastic
import faults
import kills
import process
import pytest
import stored
from damage import Harness, count
from pool_runs import assert_same_tensors, lines, train_rank
from test_power import TINY

from fivefold.checkpoint import store
from fivefold.recipe import Recipe, load

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("".join(f"{i} and {i * i % 89}; " for i in range(300)))
    return load("quickstart", [*TINY, f"data.source={folder / 'text.txt'}", f"data.cache={folder / 'cache'}"])


def test_damage_is_found_before_weights_change(recipe: Recipe, tmp_path: Path) -> None:
    harness = Harness(recipe, tmp_path, ranks=1)
    found = [harness.damaged(number, seed=1) for number in range(26)]
    assert not [outcome for _, outcome in found if outcome.startswith("accepted")], count(found)


def test_clocks_that_jump(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By days, forth and back, at each look."""
    train_rank(0, 1, recipe, tmp_path / "calm")
    at, real = random.Random(1), time.time
    monkeypatch.setattr(time, "time", lambda: real() + at.uniform(-1e7, 1e7))
    train_rank(0, 1, recipe, tmp_path / "jumps")
    a, b = (stored.load(store.latest(tmp_path / name)) for name in ("calm", "jumps"))
    assert_same_tensors(a.model, b.model)
    assert all(0 < seconds < 60 for seconds in lines(tmp_path / "jumps", "step_s"))


@pytest.mark.chaos
def test_a_run_whose_rank_is_killed(tmp_path: Path) -> None:
    """See `python tests/chaos/run.py kills` for more."""
    found = kills.trial(0, 0, tmp_path, ["save"], ("rank",))
    assert "lost" not in found
    assert [kill["moment"] for kill in found["kills"]] == ["save"]


@pytest.mark.chaos
def test_ranks_that_leave_and_join(tmp_path: Path) -> None:
    """See `python tests/chaos/run.py elastic` for more."""
    found = elastic.trial(0, 0, tmp_path, rounds=1)
    assert "lost" not in found
    assert {event["ranks"] for event in found["events"]} == {3, 4}


@pytest.mark.chaos
@pytest.mark.parametrize("layout", ["dp=2", "pp=2", "dp=2,tp=2"])
def test_ranks_that_are_suspended_or_slow(tmp_path: Path, layout: str) -> None:
    at = random.Random(layout)
    faults.disturbed(tmp_path, layout, 200, faults.suspend(3.0, at), "suspended")
    faults.disturbed(tmp_path, layout, 200, faults.slow_down(5.0, at), "slow")


@pytest.mark.chaos
@pytest.mark.parametrize("staleness", [0, -1])
def test_a_worker_of_parameter_servers_that_hangs(tmp_path: Path, staleness: int) -> None:
    """All ranks are started again; synchronous ones end with the bits of an undisturbed run."""
    sets = [
        *process.overrides(tmp_path, "dp=2", 200, 20),
        "sync.method=server",
        f"sync.staleness={staleness}",
    ]
    sets += ["observe.hang_s=3"]
    wanted = kills.undisturbed(tmp_path, "dp=2", sets, 200)
    run = process.Run(tmp_path / "run", "dp=2", sets)
    try:
        run.start()
        assert run.wait(lambda: run.step >= 40, 60), run.tail()
        since = time.monotonic()
        process.send(run.ranks()[2], signal.SIGSTOP)
        assert run.wait(lambda: run.stepped(since) is not None, 60), run.tail()
        run.wait(lambda: False, 60)
        assert run.code == 0, run.tail()
    finally:
        run.close()
    said = "\n".join(line for _, line in run.lines)
    assert re.search(r"rank 2 \(worker 1\) is missing: it is stopped .* Starting 3 ranks again", said), said
    assert [*run.out.glob("traces/hang-step-*.txt")]
    assert staleness or not kills.difference(wanted, run.out)


@pytest.mark.chaos
def test_disks_that_are_full_or_read_only(tmp_path: Path) -> None:
    """The run goes on, says so, and saves when it can again; started again if it ended."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("needs a mount namespace, which is not permitted here")
    command = ["unshare", "-m", sys.executable, str(HERE / "faults.py"), "disk", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
