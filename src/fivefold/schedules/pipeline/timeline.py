"""When each rank did what: simulated or measured, the same data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fivefold.schedules.pipeline.action import Action


class Event(NamedTuple):
    """An action of a rank, from `start` to `end` in seconds since the step began."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """`rows[r]`: the computations of rank r, by time and without overlap."""

    rows: tuple[tuple[Event, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def start(self) -> float:
        """When the first rank starts, in seconds."""
        return min((event.start for event in self.events()), default=0.0)

    @property
    def end(self) -> float:
        """When the last rank ends, in seconds."""
        return max((event.end for event in self.events()), default=0.0)

    @property
    def makespan(self) -> float:
        """From the first start to the last end, in seconds."""
        return self.end - self.start

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which they compute nothing, 0..1."""
        return sum(map(self.idle_share, range(self.ranks))) / self.ranks

    def busy(self, rank: int) -> float:
        """How long a rank computes, in seconds."""
        return sum(event.end - event.start for event in self.rows[rank])

    def idle_share(self, rank: int) -> float:
        """Share of the makespan in which a rank computes nothing, 0..1."""
        return 1 - self.busy(rank) / self.makespan if self.makespan else 0.0

    def events(self) -> Iterator[Event]:
        """The events of all ranks."""
        for row in self.rows:
            yield from row
