"""PyTorch's pipeline runtime and this package read each other's schedules."""

import pytest
from schedule_texts import read
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import _Action, _simulate_comms_compute, _validate_schedule

from fivefold.schedules.pipeline import SCHEDULES, build, check, peak_live, simulate, with_transfers

THEIRS = {
    "gpipe": "GPipe",  # not 1F1B: the order that PyTorch prints of it has a microbatch too many
    "interleaved": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


@pytest.mark.parametrize("name", [name for name, made in SCHEDULES.items() if made.copies == 1])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 3), (4, 8), (3, 7)])
def test_pytorch_accepts_ours(name: str, ranks: int, microbatches: int) -> None:
    schedule = build(name, ranks, microbatches, 2 if name in ("interleaved", "looped_bfs") else 1)
    as_theirs = lambda rows: {  # noqa: E731
        rank: [_Action.from_str(str(action)) for action in row] for rank, row in enumerate(rows)
    }
    placed = _validate_schedule(as_theirs(schedule.rows), ranks, schedule.stages, microbatches)
    assert tuple(placed[stage] for stage in range(schedule.stages)) == schedule.rank_of
    done = _simulate_comms_compute(as_theirs(with_transfers(schedule)), placed.__getitem__, schedule.stages)
    assert sum(action is not None for row in done.values() for action in row) == sum(
        map(len, with_transfers(schedule))
    )


@pytest.mark.parametrize(("name", "theirs"), THEIRS.items())
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 16)])
@pytest.mark.parametrize("with_comms", [False, True])
def test_ours_read_pytorchs_and_are_not_slower(
    name: str, theirs: str, ranks: int, microbatches: int, with_comms: bool
) -> None:
    stages = 1 if name == "gpipe" else 2
    rows = get_schedule_ops(theirs, ranks, microbatches, stages, with_comms=with_comms and stages > 1)
    theirs_read = read("\n".join(",".join(str(action or "") for action in row) for row in rows), theirs)
    check(theirs_read)
    ours = build(name, ranks, microbatches, stages)
    assert ours.rank_of == theirs_read.rank_of
    assert simulate(ours).makespan <= simulate(theirs_read).makespan
    assert max(peak_live(ours)) <= max(peak_live(theirs_read))
