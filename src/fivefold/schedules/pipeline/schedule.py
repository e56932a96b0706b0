"""A pipeline schedule: the rank of each stage, and the order in which each rank computes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from fivefold.schedules.pipeline.action import Action, Result, makes, needs
from fivefold.schedules.walk import Walk, walk

Placement = Literal["loop", "v"]


@dataclass(frozen=True)
class Schedule:
    """`rank_of[s]` is the rank of stage s; `rows[r]` are the computations of rank r, in their order. paired: see
    `pairs`."""

    name: str
    microbatches: int
    rank_of: tuple[int, ...]
    rows: tuple[tuple[Action, ...], ...]
    paired: bool = False

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    @property
    def splits_backward(self) -> bool:
        """True if any backward is split into I and W."""
        return any(action.kind == "I" for row in self.rows for action in row)

    @cached_property
    def walked(self) -> Walk[Action, Result]:
        """The walk of all ranks through their rows."""
        return walk(self.rows, self._needs, self._makes)

    @cached_property
    def pairs(self) -> dict[Action, Action]:
        """Each F that runs together with the B behind it, which is of another stage (DualPipe: arXiv 2412.19437). The
        messages of one are under way while the other computes. A pair begins when both have their inputs, and gives
        both results at its end."""
        neighbours = (pair for row in self.rows for pair in pairwise(row)) if self.paired else ()
        return {a: b for a, b in neighbours if (a.kind, b.kind) == ("F", "B") and a.stage != b.stage}

    def _needs(self, action: Action) -> tuple[Result, ...]:
        own, behind = needs(action, self.stages - 1), self.pairs.get(action)
        return own if behind is None else own + needs(behind, self.stages - 1)

    def _makes(self, action: Action) -> tuple[Result, ...]:
        if action in self.pairs:
            return ()
        both = (makes(action), makes(self.ahead[action]) if action in self.ahead else None)
        return tuple(result for result in both if result)

    @cached_property
    def ahead(self) -> dict[Action, Action]:
        """The F of each B that runs in a pair."""
        return {behind: ahead for ahead, behind in self.pairs.items()}

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, ascending."""
        return [stage for stage, owner in enumerate(self.rank_of) if owner == rank]


def place(placement: Placement, ranks: int, chunks: int) -> tuple[int, ...]:
    """The rank of each of `ranks x chunks` stages. `loop` starts over at rank 0, `v` turns around (0 1 1 0)."""
    forth = list(range(ranks))
    back = forth[::-1] if placement == "v" else forth
    return tuple(rank for chunk in range(chunks) for rank in (back if chunk % 2 else forth))
