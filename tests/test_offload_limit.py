"""Training under a limit that the states exceed. It needs a writable memory cgroup of version 1."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.mark.slow
@pytest.mark.skipif(not os.access(MEMORY, os.W_OK), reason=f"{MEMORY} is not a writable cgroup of version 1")
def test_states_of_twice_the_limit(tmp_path):
    """50M parameters have 0.9 GB of states. They train within 440 MiB, with the bits of training in memory (which the
    benchmark compares)."""
    sizes = ["--layers", "15", "--seq", "64", "--batch", "2", "--microbatch", "1", "--limit-mib", "440"]
    out = tmp_path / "found.json"
    command = [
        sys.executable,
        BENCHMARKS / "offload.py",
        *sizes,
        "--steps",
        "4",
        "--dir",
        tmp_path / "away",
        "--out",
        out,
    ]
    subprocess.run(command, check=True, timeout=280)
    found = json.loads(out.read_text())
    assert found["all:disk"]["states_by_limit"] > 1.9
    assert found["all:disk"]["cgroup_peak_bytes"] <= 440 << 20
    assert not [*(tmp_path / "away").iterdir()]
