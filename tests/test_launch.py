"""Where ranks come from, and that local runs listen on loopback only."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_train import TINY

from fivefold.parallel import ranks


@pytest.fixture
def clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_")) or name in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "MASTER_ADDR",
        ):
            monkeypatch.delenv(name)
    return monkeypatch


def test_alone(clean):
    assert ranks.found() is None
    with ranks.join() as mine:
        assert (mine.rank, mine.world, mine.first) == (0, 1, True)


def test_torchrun(clean):
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        clean.setenv(name, value)
    assert ranks.found() == (5, 8, 1, 4)


def test_slurm(clean):
    values = {"PROCID": "5", "NTASKS": "8", "LOCALID": "1", "STEP_ID": "0", "STEP_TASKS_PER_NODE": "4(x2)"}
    for name, value in values.items():
        clean.setenv(f"SLURM_{name}", value)
    assert ranks.found() == (5, 8, 1, 4)
    clean.setenv("SLURM_NTASKS", "1")
    assert ranks.found() is None, "an interactive shell of one task is no launcher"


def listening(pids: set[int]) -> set[str]:
    """Addresses (hex, as the kernel prints them) on which processes listen for TCP connections."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].split(":")[0])
    return found


def family(pid: int) -> set[int]:
    """A process and all its descendants."""
    found, new = {pid}, [pid]
    while new:
        children = Path(f"/proc/{new.pop()}/task")
        for task in children.glob("*/children"):
            for child in map(int, task.read_text().split()):
                if child not in found:
                    found.add(child)
                    new.append(child)
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc")
def test_local_runs_listen_on_loopback_only_and_leave_no_process(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    sets = [
        f"--set={o}"
        for o in (*TINY, "train.steps=100000", f"data.source={text}", f"data.cache={tmp_path / 'cache'}")
    ]
    out = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "fivefold.cli.main",
        "train",
        "quickstart",
        *sets,
        "--nproc=2",
        f"--out={out}",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not (out / "metrics.jsonl").exists() or (out / "metrics.jsonl").stat().st_size < 1000:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        everyone = family(process.pid)
        addresses = listening(everyone)
        process.terminate()
        process.wait(60)
    finally:
        process.kill()
    assert len(everyone) >= 3, "the command and two ranks"
    assert addresses, "gloo's ranks listen somewhere"
    assert addresses <= {"0100007F", "0" * 24 + "01000000"}, addresses  # 127.0.0.1 and ::1
    assert process.returncode == 128 + 15, "stopped by SIGTERM, after saving"
    assert list((out / "checkpoints").glob("step-*/manifest.json"))
    time.sleep(0.2)
    assert not any(Path(f"/proc/{pid}").exists() for pid in everyone - {process.pid})
