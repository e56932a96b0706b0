"""Every collective on NCCL, beside the plain computation. A smoke test for machines with several GPUs."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from test_collectives_run import of_rank, wanted

from fivefold.comm import everyone
from fivefold.comm.execute import Beside, Executor, Scheduled
from fivefold.launch.local import start_ranks
from fivefold.launch.ranks import Ranks
from fivefold.schedules.collectives import ALGORITHMS, PRIMITIVES, build, shape_of

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 2, reason=f"NCCL needs a GPU per rank, at least two; there are {GPUS}")


def run(folder: Path, ranks: Ranks) -> None:
    axis, world, done = everyone(ranks), ranks.world, []
    every = [of_rank(r, torch.float32, 2 * world, 3).cuda() for r in range(world)]
    for primitive in PRIMITIVES:
        for name, made in ALGORITHMS[primitive].items():
            shape = shape_of(world, root=world - 1)
            if made.fits(shape) and not made.switches:
                x = every[ranks.rank][: 2 if primitive in ("all_gather", "gather") else None]
                found = Executor(axis, build(primitive, name, shape))(x.clone())
                right = wanted(primitive, ranks.rank, world, world - 1, every)
                assert right is None or torch.equal(found, right), f"{primitive} {name}, rank {ranks.rank}"
                done.append(f"{primitive} {name}")
    started = Scheduled(Beside(axis), "ring").start(x := every[ranks.rank].clone())  # on a stream
    started()
    assert torch.equal(x, torch.stack(every).sum(0)), f"rank {ranks.rank}"
    (folder / f"{ranks.rank}.json").write_text(json.dumps(done))


def test_every_collective_on_gpus(tmp_path: Path) -> None:
    world = min(4, GPUS)
    start_ranks(partial(run, tmp_path), world, fork=False)
    assert all(len(json.loads((tmp_path / f"{rank}.json").read_text())) > 20 for rank in range(world))
