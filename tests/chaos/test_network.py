"""Two hosts between which the network is lost, or becomes very slow: the run goes on, or ends and can be resumed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import process
import pytest
import stored
from namespaces import Done, Hosts
from pool_runs import lines

from fivefold.checkpoint import store

GLOO = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
LAYOUT, STEPS = "dp=4", 200

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("network")


@pytest.fixture(scope="module")
def whole(hosts: Hosts, folder: Path) -> Path:
    done = train(hosts, folder, folder / "whole", lambda: None)
    assert done.code == 0, str(done)
    return folder / "whole"


def train(hosts: Hosts, folder: Path, out: Path, fault: Callable[[], None]) -> Done:
    """Trains across the hosts. The fault comes after 20 new steps."""
    if (out / "recipe.toml").exists():
        command = [str(out), "--resume"]
    else:
        sets = [f"--set={one}" for one in process.overrides(folder, LAYOUT, STEPS, 20)]
        command = ["quickstart", f"--out={out}", f"--layout={LAYOUT}", *sets]

    def meanwhile(launchers: list[subprocess.Popen[bytes]]) -> None:
        deadline = time.monotonic() + 90
        while not (out / "metrics.jsonl").exists() or len(lines(out, "step_s")) < 20:
            assert all(launcher.poll() is None for launcher in launchers)
            assert time.monotonic() < deadline
            time.sleep(0.1)
        fault()

    environment = GLOO | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    argv = [sys.executable, "-m", "fivefold.cli.main", "train", *command]
    return hosts.run(argv, 2, capture=True, timeout_s=200, env=environment, meanwhile=meanwhile)


def assert_same(a: Path, b: Path) -> None:
    one, other = (stored.load(store.latest(run)) for run in (a, b))
    assert one.meta["step"] == other.meta["step"] == STEPS
    assert all(bool((one.model[name] == other.model[name]).all()) for name in one.model)


def test_a_network_that_is_lost_for_some_seconds(hosts: Hosts, folder: Path, whole: Path) -> None:
    def fault() -> None:
        hosts.connect(1, up=False)
        time.sleep(5)
        hosts.connect(1)

    done = train(hosts, folder, folder / "short", fault)
    assert done.code == 0, str(done)
    assert_same(folder / "short", whole)


def test_a_network_of_1_kbit_per_second(hosts: Hosts, folder: Path, whole: Path) -> None:
    def fault() -> None:
        hosts.connect(1, rate="1kbit")
        time.sleep(5)
        hosts.connect(1, rate="200mbit")

    done = train(hosts, folder, folder / "slow", fault)
    assert done.code == 0, str(done)
    assert_same(folder / "slow", whole)


def test_a_network_that_is_lost(hosts: Hosts, folder: Path, whole: Path) -> None:
    """Both launchers end with an error in bounded time. Then the run is resumed."""
    lost: list[float] = []

    def fault() -> None:
        hosts.connect(1, up=False)
        lost.append(time.monotonic())

    try:
        done = train(hosts, folder, folder / "lost", fault)
    finally:
        hosts.connect(1)
    assert done.code not in (0, 124), str(done)
    assert time.monotonic() - lost[0] < 90
    done = train(hosts, folder, folder / "lost", lambda: None)
    assert done.code == 0, str(done)
    assert_same(folder / "lost", whole)
