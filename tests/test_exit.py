"""Ranks that end right after their last collective end well: gloo's threads are waited for (`launch/ranks.py`)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.launch.ranks import STORE_FILE

# Only the garbage collector frees the group. Nobody waits for the works: gloo's threads are the last to let go of their
# tensors, and need the interpreter for that.
RANK = """
import torch
import torch.distributed as dist

from fivefold.launch.ranks import join

class Holder:
    pass

def work():
    holder = Holder()
    holder.itself, holder.group = holder, dist.new_group([0, 1])
    for _ in range(20):
        dist.all_reduce(torch.ones(200_000), group=holder.group, async_op=True)

with join():
    work()
"""


@pytest.mark.slow
def test_ranks_that_leave_at_once_end_well(tmp_path: Path) -> None:
    """Ten times: without the wait, two pairs of five had a process that aborted."""
    for number in range(10):
        pair = [
            subprocess.Popen(
                [sys.executable, "-c", RANK],
                env=os.environ
                | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
                | {STORE_FILE: str(tmp_path / f"store-{number}"), "GLOO_SOCKET_IFNAME": "lo"},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in (0, 1)
        ]
        said = [process.communicate(timeout=120)[1] for process in pair]
        assert [process.returncode for process in pair] == [0, 0], said
