"""One forward, one backward: with one stage a rank (arXiv 2006.09503), and interleaved (arXiv 2104.04473)."""

from __future__ import annotations

from fivefold.schedules.pipeline.action import Action
from fivefold.schedules.pipeline.row import Row


def one_f_one_b(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """Starts a backward as soon as there is one, so that at most `ranks - rank` microbatches are live.

    Idle share (p-1) / (m+p-1) with p ranks and m microbatches, as GPipe.
    """
    assert chunks == 1
    return _alternate([rank] * microbatches, [rank] * microbatches, warmup=ranks - rank - 1)


def interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """1F1B with several stages a rank: microbatches go through the first stage in rounds, and a round comes
    back for the rank's next stage before the next round starts.

    Idle share (p-1) / (vm+p-1) with v stages a rank and m >= p microbatches. A round has at least p
    microbatches where there are as many; their number need not be a multiple of p (section 3.3.2 of the Llama
    3 report, arXiv 2407.21783).
    """
    rounds = split_into_rounds(microbatches, ranks)
    stages = range(rank, ranks * chunks, ranks)
    forwards = [stage for size in rounds for stage in stages for _ in range(size)]
    backwards = [stage for size in rounds for stage in reversed(stages) for _ in range(size)]
    return _alternate(forwards, backwards, warmup=(chunks - 1) * rounds[0] + 2 * (ranks - rank - 1))


def split_into_rounds(microbatches: int, ranks: int) -> list[int]:
    """Sizes of the rounds: `ranks` each, and what is left over is spread over the first rounds.

    A round of fewer than `ranks` would leave ranks idle; a later one that is larger than the first would need
    activations that the warm-up has not made.
    """
    count = max(1, microbatches // ranks)
    size, rest = divmod(microbatches, count)
    return [size + (number < rest) for number in range(count)]


def _alternate(forwards: list[int], backwards: list[int], warmup: int) -> list[Action]:
    """`warmup` forwards, then forward and backward by turns, then the backwards that remain."""
    row = Row()
    warmup = min(warmup, len(forwards))
    for stage in forwards[:warmup]:
        row.add("F", stage)
    for position, stage in enumerate(backwards):
        if warmup + position < len(forwards):
            row.add("F", forwards[warmup + position])
        row.add("B", stage)
    return row.actions
