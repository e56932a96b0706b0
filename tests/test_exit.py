"""Ranks that end right after their last collective end well: gloo's threads are waited for (`parallel/ranks.py`)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.parallel.ranks import STORE_FILE

# A group, and works on it, in a reference cycle: only the garbage collector frees them.
RANK = """
import torch
import torch.distributed as dist

from fivefold.parallel.ranks import join

class Holder:
    pass

with join() as ranks:
    holder = Holder()
    holder.itself, holder.group = holder, dist.new_group([0, 1])
    tensors = [torch.ones(100) for _ in range(50)]
    holder.works = [dist.all_reduce(t, group=holder.group, async_op=True) for t in tensors]
    for work in holder.works:
        work.wait()
    assert all(t.sum() == 200 for t in tensors)
"""


@pytest.mark.slow
def test_ranks_that_leave_at_once_end_well(tmp_path: Path) -> None:
    """Ten times: the mistake, a process that aborts, does not show every time."""
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
