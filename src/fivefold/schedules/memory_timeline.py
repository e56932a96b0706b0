"""Bytes of a rank's tensors over one step, by category, with the phases of the step. No torch.

It is measured in a run or on tensors without memory (`trace/memory.Tracker`) and drawn by `observe/memory_picture.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

CATEGORIES = {
    "params": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "buffers": "messages and other buffers",
}
"""The categories of memory, with their names in pictures. The planner predicts them (`plan/memory/memory.py`), and the
tracker measures them."""
AWAY = {"host": "host memory", "disk": "files on disk"}
"""Where `layout.offload` keeps what it takes off the device; no sum counts it. A CPU's own memory is not a host's."""
PHASES = ("forward", "backward", "update", "other")
BINS = 240
"""Parts of a step of which the largest sum is kept."""


class Phase(NamedTuple):
    """What the rank does from `start` to `end`: one of PHASES."""

    kind: str
    start: float
    end: float


class Change(NamedTuple):
    """Bytes more, or less, of a category at a time."""

    at: float
    category: str
    size: int


@dataclass(frozen=True)
class MemoryTimeline:
    """One step of a rank.

    bytes: of each category, in equal parts of the step; each part shows the moment with most bytes in it. So the step's
    peak is exact. length: of the step, in `unit`: "s", or "changes" (tensors allocated or freed) if no time passed.
    away: the most bytes in each part of the step, of those of AWAY that the step has.
    """

    bytes: dict[str, tuple[int, ...]]
    phases: tuple[Phase, ...]
    length: float
    unit: str
    rank: int = 0
    step: int = 0
    away: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def totals(self) -> list[int]:
        return [sum(sizes) for sizes in zip(*self.bytes.values(), strict=True)]

    @property
    def peak(self) -> int:
        return max(self.totals, default=0)

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes of each category when the sum is largest."""
        number = self.totals.index(self.peak)
        return {name: sizes[number] for name, sizes in self.bytes.items()}

    def phase_at(self, share: float) -> str:
        """The phase at a share of the step, 0..1."""
        at = share * self.length
        return next((phase.kind for phase in self.phases if phase.start <= at < phase.end), "other")

    @property
    def peak_phase(self) -> str:
        totals = self.totals
        return self.phase_at((totals.index(max(totals)) + 0.5) / len(totals)) if totals else "other"

    def as_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "step": self.step,
            "peak_bytes": self.peak,
            "at_peak": self.at_peak,
            "length": self.length,
            "unit": self.unit,
            "phases": [list(phase) for phase in self.phases],
            "bytes": {name: list(sizes) for name, sizes in self.bytes.items()},
            **({"away": {name: list(sizes) for name, sizes in self.away.items()}} if self.away else {}),
        }


def from_json(found: dict[str, Any]) -> MemoryTimeline:
    """The inverse of `MemoryTimeline.as_json`."""
    return MemoryTimeline(
        {name: tuple(found["bytes"][name]) for name in CATEGORIES},
        tuple(Phase(*phase) for phase in found["phases"]),
        found["length"], found["unit"], found["rank"], found["step"],
        {name: tuple(sizes) for name, sizes in found.get("away", {}).items()},
    )  # fmt: skip


def of_changes(
    changes: Iterable[Change], phases: Sequence[Phase], length: float, unit: str, rank: int = 0, step: int = 0
) -> MemoryTimeline:
    """The timeline of changes in order of time."""
    now, total = dict.fromkeys((*CATEGORIES, *AWAY), 0), 0
    away = {name: [0] * BINS for name in AWAY}
    most: list[tuple[int, dict[str, int]] | None] = [None] * BINS
    part, width = 0, length / BINS or 1.0

    def note(number: int) -> None:
        for name, sizes in away.items():
            sizes[number] = max(sizes[number], now[name])
        kept = most[number]
        if kept is None or total > kept[0]:
            most[number] = total, dict(now)

    for change in changes:
        found = min(BINS - 1, int(change.at / width))
        while part < found:  # a part without changes shows what was there before it
            part += 1
            note(part)
        now[change.category] += change.size
        total += change.size * (change.category in CATEGORIES)
        note(part)
    for number in range(part + 1, BINS):
        note(number)
    filled = [sizes for _, sizes in (one or (0, dict(now)) for one in most)]
    return MemoryTimeline(
        {name: tuple(sizes[name] for sizes in filled) for name in CATEGORIES},
        tuple(phases), length, unit, rank, step,
        {name: tuple(sizes) for name, sizes in away.items() if any(sizes)},
    )  # fmt: skip
