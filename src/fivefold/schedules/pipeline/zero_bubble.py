"""Zero bubble (arXiv 2401.10241): backward is split into I, which others wait for, and W, which fills gaps."""

from __future__ import annotations

from fivefold.schedules.pipeline.action import Action
from fivefold.schedules.pipeline.row import Row


def zb_h1(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """1F1B whose W come `rank` microbatches late: later ranks send gradients upwards sooner, and have W left
    for the end, where they would otherwise be idle.

    Every rank holds at most `ranks` microbatches, as rank 0 does in 1F1B. Idle time a rank, with m >= p
    microbatches and costs F, I >= W: (p-1) (F + I - W), which is a third of 1F1B's if they are equal.
    """
    assert chunks == 1
    row = Row()
    warmup = min(ranks - rank - 1, microbatches)
    for _ in range(warmup):
        row.add("F", rank)
    for position in range(microbatches):
        if warmup + position < microbatches:
            row.add("F", rank)
        row.add("I", rank)
        if position >= rank:
            row.weight()
    row.weights()
    return row.actions


def zbv(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """ZB-V: each rank has one stage on the way down the V and one on the way up, so the last stage is on rank
    0 and the first backward starts there.

    If F, I and W take equal time and m >= 2p-1, no rank is idle between its first and its last action: what is
    left is the shift of the start, p-1 forwards of one stage, half a rank's layers. Memory as 1F1B: at most 2p
    stages of half the size are live.

    Needs microbatches >= 2 ranks - 1 (`build` drops those that are too many).
    """
    assert chunks == 2
    assert microbatches >= 2 * ranks - 1
    row = Row()
    down, up, after = rank, 2 * ranks - 1 - rank, ranks - rank - 1  # `after`: ranks further down the V
    for _ in range(2 * after + 1):
        row.add("F", down)
    for _ in range(rank):
        row.add("F", up)
        row.add("F", down)
    for _ in range(after + 1):
        row.add("F", up)
        row.add("I", up)
        row.weight()
    for position in range(microbatches - ranks):
        if position < microbatches - ranks - after:
            row.add("F", down)
        row.add("I", down)
        row.weight()
        row.add("F", up)
        row.add("I", up)
        row.weight()
    for _ in range(rank):  # nothing left to forward: gradients first, W last
        row.add("I", down)
        row.add("I", up)
    for _ in range(after + 1):
        row.add("I", down)
        row.weight()
    row.weights()
    return row.actions
