"""Timelines of actions on ranks. Simulated and measured timelines have the same form, for any kind of action."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

A = TypeVar("A")


class Event(NamedTuple, Generic[A]):
    """An action of a rank, from `start` to `end` in seconds since the step began."""

    action: A
    start: float
    end: float


@dataclass(frozen=True)
class Timeline(Generic[A]):
    """`rows[r]`: the events of rank r, in time order and without overlap."""

    rows: tuple[tuple[Event[A], ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @cached_property
    def start(self) -> float:
        """When the first rank starts, in seconds."""
        return min((event.start for event in self.events()), default=0.0)

    @cached_property
    def end(self) -> float:
        """When the last rank ends, in seconds."""
        return max((event.end for event in self.events()), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return self.end - self.start

    @cached_property
    def bubble(self) -> float:
        """Share of all ranks' time in which they are idle, 0..1."""
        return sum(map(self.idle_share, range(self.ranks))) / self.ranks

    def busy(self, rank: int) -> float:
        """Seconds in which a rank works."""
        return sum(event.end - event.start for event in self.rows[rank])

    def idle_share(self, rank: int) -> float:
        """Share of the makespan in which a rank is idle, 0..1."""
        return 1 - self.busy(rank) / self.makespan if self.makespan else 0.0

    def events(self) -> Iterator[Event[A]]:
        """The events of all ranks."""
        for row in self.rows:
            yield from row
