"""The rank pool itself: results in order, errors and hangs named, no process left."""

import time

import pytest
import torch
import torch.distributed as dist
from ranks import Pool, RankFailed, run_ranks


def _sum(rank, world, offset):
    total = torch.tensor([float(rank + offset)])
    dist.all_reduce(total)
    return rank, total.item()


def _raise_on_one(rank, world):
    if rank == 1:
        raise KeyError("lost")
    dist.barrier()


def _hang_on_one(rank, world):
    if rank == 1:
        time.sleep(60)


def _die(rank, world):
    if rank == 0:
        import os

        os._exit(3)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_results_come_in_rank_order(world):
    expected = sum(range(world)) + 10 * world
    assert run_ranks(world, _sum, 10) == [(rank, expected) for rank in range(world)]


def test_a_rank_that_raises_is_named_with_its_traceback():
    with pytest.raises(RankFailed, match=r"(?s)rank 1 of 2:.*KeyError: 'lost'"):
        run_ranks(2, _raise_on_one)
    assert run_ranks(2, _sum, 0)[1] == (1, 1.0), "the next call has a fresh pool"


def test_a_stuck_rank_is_named_with_its_line():
    pool = Pool(2)
    with pytest.raises(RankFailed, match=r"(?s)rank 1 of 2 is stuck after [0-9.]+ s.*_hang_on_one"):
        pool.run(_hang_on_one, timeout_s=5)
    assert not any(process.is_alive() for process in pool.processes)


def test_a_rank_that_dies_is_named():
    with pytest.raises(RankFailed, match="rank 0 of 2: died, exit code 3"):
        Pool(2).run(_die, timeout_s=10)
