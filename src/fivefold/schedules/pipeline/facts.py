"""Facts about schedules for a search over thousands of layouts. They are read from the rows of few microbatches,
once."""

from __future__ import annotations

from collections import Counter
from functools import cache

from fivefold.schedules.pipeline.registry import build_row

FILLING = 2
"""Microbatches per pipeline rank that fill the pipeline. More do not raise any rank's memory, unless it holds all."""


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
