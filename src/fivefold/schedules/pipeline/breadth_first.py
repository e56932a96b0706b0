"""All forwards, then all backwards: GPipe (arXiv 1811.06965); with several stages a rank, looped breadth-first
(arXiv 2211.05953)."""

from __future__ import annotations

from fivefold.schedules.pipeline.action import Action
from fivefold.schedules.pipeline.row import Row


def breadth_first(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """Each stage meets every microbatch before the next stage of the rank begins.

    Idle share (p-1) / (vm+p-1) with p ranks, v stages a rank and m >= p microbatches; every microbatch is live
    at once.
    """
    row = Row()
    stages = range(rank, ranks * chunks, ranks)
    for stage in stages:
        for _ in range(microbatches):
            row.add("F", stage)
    for stage in reversed(stages):
        for _ in range(microbatches):
            row.add("B", stage)
    return row.actions
