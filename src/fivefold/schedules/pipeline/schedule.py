"""A pipeline schedule: the rank of each stage, and the order in which each rank computes."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from fivefold.errors import UserError
from fivefold.schedules.pipeline.action import Action, Result, makes, needs, parse
from fivefold.schedules.walk import Walk, walk

Placement = Literal["loop", "v"]
OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")
LEFT_OUT = re.compile(r"\d+(UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD|WAIT_SEND_[FB]\d+)")
"""Actions of PyTorch's files that are not part of a schedule. The waits are there since torch 2.15."""


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

    def to_csv(self) -> str:
        """Text with one line per rank and one cell per computation or pair. `from_csv` and PyTorch's runtime read
        it."""
        lines = []
        for row in self.rows:
            cells = [
                f"({action};{self.pairs[action]})OVERLAP_F_B" if action in self.pairs else str(action)
                for action in row
                if action not in self.ahead
            ]
            lines.append(",".join(cells) + "\n")
        return "".join(lines)


def place(placement: Placement, ranks: int, chunks: int) -> tuple[int, ...]:
    """The rank of each of `ranks x chunks` stages. `loop` starts over at rank 0, `v` turns around (0 1 1 0)."""
    forth = list(range(ranks))
    back = forth[::-1] if placement == "v" else forth
    return tuple(rank for chunk in range(chunks) for rank in (back if chunk % 2 else forth))


def to_csv(rows: Sequence[Sequence[Action]]) -> str:
    """Rows of actions, with or without transfers, as text: one line per rank, one cell per action."""
    return "".join(",".join(map(str, row)) + "\n" for row in rows)


def from_csv(text: str, name: str = "own") -> Schedule:
    """Reads a schedule from a file's text, one line per rank. Empty lines and cells are skipped.

    Files written by PyTorch's runtime work, too. Only the order of computations is kept: sends and receives follow from
    it (`transfers.py`), and `LEFT_OUT` is not part of a schedule. The file determines ranks, stages and
    microbatches. `check` tests whether the schedule can run.

    Raises:
        UserError: names the rank and the text that is not an action, or a stage that is missing or on two ranks.
    """
    rows = []
    for cells in filter(None, csv.reader(io.StringIO(text))):
        try:
            rows.append(tuple(action for cell in cells for action in _actions(cell.strip())))
        except UserError as error:
            raise UserError(f"schedule '{name}', line of rank {len(rows)}: {error}") from None
        if not rows[-1]:
            raise UserError(f"schedule '{name}', line of rank {len(rows) - 1}: it has no computation")
    if not rows:
        raise UserError(
            f"schedule '{name}' is empty: it needs one line per rank, for example 0F0,0F1,0B0,0B1"
        )
    rank_of = {action.stage: rank for rank, row in enumerate(rows) for action in row}
    for rank, row in enumerate(rows):
        for action in row:
            if rank_of[action.stage] != rank:
                both = f"ranks {rank} and {rank_of[action.stage]}"
                raise UserError(
                    f"schedule '{name}': {action}: stage {action.stage} is on {both}, but must be on one rank"
                )
    for stage in range(len(rank_of)):
        if stage not in rank_of:
            raise UserError(f"schedule '{name}' has stage {max(rank_of)}, but no action of stage {stage}")
    microbatches = 1 + max(action.microbatch for row in rows for action in row)
    places = tuple(rank_of[stage] for stage in range(len(rank_of)))
    return Schedule(name, microbatches, places, tuple(rows), paired="OVERLAP_F_B" in text)


def _actions(cell: str) -> Iterator[Action]:
    """The computations of one cell: none, one, or the two of `(0F4;3B1)OVERLAP_F_B`."""
    if pair := OVERLAPPED.fullmatch(cell):
        for part in pair[1].split(";"):
            yield parse(part.strip())
    elif cell and not LEFT_OUT.fullmatch(cell):
        action = parse(cell)
        if action.computes:
            yield action
