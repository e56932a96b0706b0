"""Counts the live activations of a rank. They depend on the order of its actions, not on their costs."""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.schedules.pipeline.schedule import Schedule


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
