"""DualPipeV: DualPipe (DeepSeek-V3, arXiv 2412.19437), cut in half: without a second copy of the parameters."""

from __future__ import annotations

from fivefold.schedules.pipeline.action import Action
from fivefold.schedules.pipeline.row import Row


def dualpipev(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """One stage on the way down the V, one on the way up. In the main part a forward and a backward of
    different microbatches follow each other, so that the transfers of one can run under the other.

    Idle time a rank, with p ranks, m >= 2p microbatches and costs F = I >= W of one stage: (p-1) (F + I - W). The
    paper's (p-1) (F&B + B - 3W) is for such pairs run as one, whose results come when both are done; here each
    sends its own at once. At most 2p+1 stages of half a rank's layers are live.

    Needs microbatches >= 2 ranks (`build` drops those that are too many).
    """
    assert chunks == 2
    assert microbatches >= 2 * ranks
    row = Row()
    down, up, after = rank, 2 * ranks - 1 - rank, ranks - rank - 1  # `after`: ranks further down the V
    for _ in range(2 * after):
        row.add("F", down)
    for _ in range(rank + 1):
        row.add("F", down)
        row.add("F", up)
    for _ in range(after):
        row.add("I", up)
        row.weight()
        row.add("F", up)
    for _ in range(microbatches - 2 * ranks + rank + 1):  # the main part: pairs of forward and backward
        row.add("F", down)
        row.add("B", up)
        row.add("F", up)
        row.add("B", down)
    for _ in range(after):
        row.add("B", up)
        row.add("F", up)
        row.add("B", down)
    for position in range(2 * (rank + 1)):  # the second half is split: its W fill what follows
        row.add("I" if position > rank else "B", down if position % 2 else up)
    for _ in range(after):
        row.weight()
        row.add("I", down)
    row.weights()
    return row.actions
