"""A grid of predictions as one JSON object, for the page of a plan (observe/page/plan.js reads it).

A valid cell is a run of 32-bit floats: HEAD, the seconds of each of `shares`, the five parts of MEMORY of each position
in the pipeline, with a pipeline the seconds of F, I and W of each stage, and the seconds of each operation in a step.
With a pipeline it also is a run of 16-bit numbers: the start of each action of the drawn timeline, rank by rank, in
65535ths of its length. Both are base64 of little-endian arrays, cell after cell.
"""

from __future__ import annotations

import base64
import itertools
import sys
from array import array
from collections.abc import Sequence
from typing import Any

from fivefold.errors import UserError
from fivefold.plan.pages import grid
from fivefold.plan.pages.grid import Base, Slider, Values
from fivefold.plan.pages.pictures import pictures
from fivefold.plan.predict import Plan
from fivefold.schedules.memory_timeline import CATEGORIES
from fivefold.schedules.pipeline import Timeline, shown
from fivefold.sharding.layout_text import to_text

HEAD = (
    "step", "tokens_per_s", "mfu", "limit", "flops", "bandwidth", "microbatches", "drawn", "makespan", "stages",
)  # fmt: skip
MEMORY = tuple(CATEGORIES)
PLACE = ("devices", "tp", "pp", "zero")
"""The sliders that a layout depends on."""
WORK = ("devices", "dim", "seq_len", "microbatch_size", "tp")
"""The sliders that an operation's FLOPs per byte and its rate depend on."""


def as_data(center: Base, command: str, sliders: Sequence[Slider]) -> dict[str, Any]:
    """Everything that the page's script needs. command: see `grid.command`."""
    rows = _Rows()
    for values, plan in grid.cells(center, sliders):
        rows.add(values, plan)
    return {
        "axes": [_slider(center, axis) for axis in sliders],
        "command": command,
        "layouts": _layouts(center, sliders),
        "head": HEAD,
        "memory": MEMORY,
        "place": PLACE,
        "workKey": WORK,
    } | rows.as_data()


def _slider(center: Base, axis: Slider) -> dict[str, Any]:
    return {
        "key": axis.key,
        "label": grid.LABELS[axis.key],
        "values": axis.values,
        "at": axis.at,
        "options": [grid.options(center, axis.key, value) for value in axis.values],
    }


def _layouts(center: Base, sliders: Sequence[Slider]) -> dict[str, str]:
    """The value of `--layout` for each valid cell."""
    found = {}
    for sizes in itertools.product(*(axis.values for axis in sliders if axis.key in PLACE)):
        values = dict(zip((axis.key for axis in sliders if axis.key in PLACE), sizes, strict=True))
        try:
            found[_key(values, PLACE)] = to_text(grid.layout_at(center, center.values | values))
        except UserError:
            continue  # its cells say why
    return found


def _key(values: Values, names: Sequence[str]) -> str:
    return ",".join(str(values[name]) for name in names)


class _Rows:
    """Collects cells, one after the other."""

    def __init__(self) -> None:
        self.index: list[
            int
        ] = []  # of each cell: 0 where it is valid, else the number of its message, from 1
        self.messages: dict[str, int] = {}
        self.heads: list[list[float]] = []
        self.seconds: list[dict[str, float]] = []  # of each valid cell's operations
        self.starts = array("H")
        self.names: dict[str, None] = {}
        self.shares: list[str] = []
        self.work: dict[str, dict[str, tuple[float, float]]] = {}
        self.schedules: dict[str, list[list[tuple[str, int, int]]]] = {}

    def add(self, values: Values, plan: Plan | str) -> None:
        if isinstance(plan, str):
            self.index.append(self.messages.setdefault(plan, len(self.messages) + 1))
            return
        self.index.append(0)
        found, s = pictures(plan), plan.setting
        length = found.timeline.makespan if found.timeline else 0.0
        stages = plan.step.costs if found.timeline else []
        roof = found.roofline
        head = [plan.step.seconds, plan.tokens_per_s, plan.mfu, plan.limit, roof.peak, roof.bandwidth]
        head += [s.microbatches, shown(s.microbatches, s.layout.pp), length, len(stages)]
        self.shares = list(found.shares)
        memory = [getattr(held, name) for held in plan.memory for name in MEMORY]
        durations = [seconds for c in stages for seconds in (c.forward, c.input, c.weight)]
        self.heads.append([*head, *found.shares.values(), *memory, *durations])
        points = roof.points
        self.names |= dict.fromkeys(point.name for point in points)
        self.seconds.append({point.name: point.seconds for point in points})
        work = self.work.setdefault(_key(values, WORK), {})
        work |= {p.name: (float(f"{p.intensity:.5g}"), float(f"{p.rate:.5g}")) for p in points}
        if found.timeline:
            self._timeline(f"{s.layout.pp},{shown(s.microbatches, s.layout.pp)}", found.timeline)

    def _timeline(self, key: str, timeline: Timeline) -> None:
        if key not in self.schedules:
            self.schedules[key] = [
                [(e.action.kind, e.action.stage, e.action.microbatch) for e in row] for row in timeline.rows
            ]
        scale, begin = 65535 / timeline.makespan, timeline.start
        self.starts.extend(round((e.start - begin) * scale) for row in timeline.rows for e in row)

    def as_data(self) -> dict[str, Any]:
        floats = array("f")
        for head, seconds in zip(self.heads, self.seconds, strict=True):
            floats.extend(head)
            floats.extend(seconds.get(name, 0.0) for name in self.names)
        return {
            "shares": self.shares,
            "operations": list(self.names),
            "work": {key: [found.get(n) for n in self.names] for key, found in self.work.items()},
            "schedules": self.schedules,
            "index": self.index,
            "messages": list(self.messages),
            "floats": _base64(floats),
            "starts": _base64(self.starts),
        }


def _base64(numbers: array[Any]) -> str:
    """The numbers in little-endian order as base64."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
