"""What a worker of `benchmarks/parameter_server.py` did, as rows of the program's pictures (docs/make_pictures.py)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from fivefold.draw.lanes import Box
from fivefold.observe.timelines import rows_of


def traced_worker(trace: Iterable[Sequence[Any]], steps: int = 2) -> dict[str, list[Box]]:
    """The rows of a worker's trace (parallel/worker.py): forward and backward of each unit, pushes and pulls, in the
    last steps."""
    events, last = list[tuple[str, int, float, float]](), ("", 0, 0.0)
    for what, unit, start, end in sorted(trace, key=lambda event: event[3]):
        if what in ("push", "pull"):
            events.append((what, unit, start, end))
            continue
        if what in ("need", "loss") and last[0] == "need":
            events.append(("forward", last[1], last[2], start))
        if what == "ready" and last[0]:
            events.append(("backward", unit, last[2], end))
        last = what, unit, end
    ends = [end for what, unit, _, end in events if what == "backward" and unit == 0]
    return rows_of(events, ends[-steps - 1] if len(ends) > steps else 0.0, math.inf)
