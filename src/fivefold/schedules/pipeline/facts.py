"""Facts about schedules: live activations, and how rows end. They depend on the order of actions, not on their costs. A
search over thousands of layouts reads them once, from the rows of few microbatches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

from fivefold.schedules.pipeline.registry import build_row
from fivefold.schedules.pipeline.schedule import Schedule

FILLING = 2
"""Microbatches per pipeline rank that fill the pipeline. More do not raise any rank's memory, unless it holds all."""


def few(microbatches: int, ranks: int, rounds: int = FILLING) -> int:
    """Fewer microbatches that are held as all of them are, if there are fewer: at least `rounds` per rank.

    They have the same remainder modulo the ranks. `interleaved` spreads it over its rounds, so there are at least as
    many rounds; with fewer, each is longer, and more is held.
    """
    rest = microbatches % ranks
    return min(microbatches, ranks * max(rounds, rest) + rest)


def shown(microbatches: int, ranks: int) -> int:
    """Microbatches that show how the pipeline fills and drains. Each further one only repeats the middle."""
    return min(microbatches, FILLING * ranks + microbatches % ranks)


@cache
def splits_backward(name: str, ranks: int, chunks: int) -> bool:
    """True if the schedule computes weight gradients separately (I and W)."""
    return any(kind == "I" for _, kind, _ in build_row(name, 0, ranks, ranks, chunks))


def peak_live(
    schedule: Schedule, size: Sequence[float] | None = None, after_input: Sequence[float] | None = None
) -> list[float]:
    """The most activations that each rank holds at once.

    `size[s]`: bytes that a microbatch holds at stage s, from its F to its B or W. The default is 1, which counts
    microbatches times stages. `after_input[s]`: the bytes still held from I to W. The default is all.
    """
    size = size or [1] * schedule.stages
    after_input = after_input or size
    change = {
        "F": size,
        "B": [-s for s in size],
        "I": [left - s for s, left in zip(size, after_input, strict=True)],
        "W": [-left for left in after_input],
    }
    peaks = []
    for row in schedule.rows:
        held = peak = 0.0
        for action in row:
            held += change[action.kind][action.stage]
            if held > peak:
                peak = held
        peaks.append(peak)
    return peaks


def most_live(
    name: str, rank: int, ranks: int, microbatches: int, chunks: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Microbatches in each of a rank's stages, ascending, at a moment when it holds most: (those between F and B or I,
    those between I and W). The whole schedule needs at least this memory at its peak.

    chunks: stages per rank.
    """
    some = min(microbatches, FILLING * ranks)
    if some < microbatches and holds_all(name, ranks, chunks):
        return (microbatches,) * chunks, (0,) * chunks
    return _most_live(name, rank, ranks, some, chunks)


@cache
def holds_all(name: str, ranks: int, chunks: int) -> bool:
    """True if all microbatches are live at once, for any number. It suffices to check enough to fill the pipeline."""
    live, _ = _most_live(name, 0, ranks, FILLING * ranks, chunks)
    return sum(live) == FILLING * ranks * chunks


@cache
def _most_live(
    name: str, rank: int, ranks: int, microbatches: int, chunks: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    row = build_row(name, rank, ranks, microbatches, chunks)
    held = most = peak = 0  # peak: number of actions until the rank first holds most
    for place, (_, kind, _) in enumerate(row, 1):
        if kind == "F":
            held += 1
            if held > most:
                most, peak = held, place
        elif kind != "I":
            held -= 1
    count = Counter((stage, kind) for stage, kind, _ in row[:peak])
    stages = sorted({stage for stage, _, _ in row})
    return (
        tuple(count[stage, "F"] - count[stage, "B"] - count[stage, "I"] for stage in stages),
        tuple(count[stage, "I"] - count[stage, "W"] for stage in stages),
    )


@cache
def ends_upwards(name: str, ranks: int, microbatches: int, chunks: int) -> bool:
    """True if every backward is one action, and each rank's last action is the backward of its first stage. Then the
    backward of all earlier stages comes after a rank's end."""
    some = min(microbatches, FILLING * ranks)
    for rank in range(ranks):
        row = build_row(name, rank, ranks, some, chunks)
        if row[-1].kind != "B" or row[-1].stage != min(row).stage or any(kind == "I" for _, kind, _ in row):
            return False
    return True
