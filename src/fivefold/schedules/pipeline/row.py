"""Writing down the actions of one rank."""

from __future__ import annotations

from collections import Counter, deque

from fivefold.schedules.pipeline.action import Action, Kind


class Row:
    """The actions of one rank. Each stage meets its microbatches in order, so only the stage is named."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._forwards: Counter[int] = Counter()
        self._backwards: Counter[int] = Counter()
        self._owed: deque[tuple[int, int]] = deque()  # (stage, microbatch) whose W is still to come

    def add(self, kind: Kind, stage: int) -> None:
        """F, B or I of the stage's next microbatch."""
        counter = self._forwards if kind == "F" else self._backwards
        microbatch = counter[stage]
        counter[stage] += 1
        self.actions.append(Action(stage, kind, microbatch))
        if kind == "I":
            self._owed.append((stage, microbatch))

    def weight(self) -> None:
        """The W that is owed longest; nothing if none is."""
        if self._owed:
            stage, microbatch = self._owed.popleft()
            self.actions.append(Action(stage, "W", microbatch))

    def weights(self) -> None:
        """Every W that is still owed."""
        while self._owed:
            self.weight()
