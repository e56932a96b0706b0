"""The schedules that a recipe can name, and how to build one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fivefold.errors import UserError, did_you_mean, several
from fivefold.schedules.pipeline.generators import (
    breadth_first,
    dualpipev,
    interleaved,
    one_f_one_b,
    v_half,
    zb_h1,
    zbv,
)
from fivefold.schedules.pipeline.schedule import Action, Placement, Schedule, place


@dataclass(frozen=True)
class Generator:
    """The generator of a schedule. All other properties of the schedule follow from its rows.

    row: (rank, ranks, microbatches, stages per rank) -> the rank's computations. stages: the fewest and the most stages
    per rank (None: no limit). instead: the schedule for another number. fill: the fewest microbatches that `row` needs,
    given the ranks. paired: neighbouring forwards and backwards run together (`Schedule.pairs`).
    """

    row: Callable[[int, int, int, int], list[Action]]
    placement: Placement = "loop"
    stages: tuple[int, int | None] = (1, 1)
    instead: str = "interleaved"
    fill: Callable[[int], int] = lambda ranks: 1
    paired: bool = False


SCHEDULES = {
    "gpipe": Generator(breadth_first, instead="looped_bfs"),
    "1f1b": Generator(one_f_one_b),
    "interleaved": Generator(interleaved, stages=(2, None), instead="1f1b"),
    "looped_bfs": Generator(breadth_first, stages=(2, None), instead="gpipe"),
    "zb_h1": Generator(zb_h1),
    "zbv": Generator(zbv, "v", stages=(2, 2), fill=lambda ranks: 2 * ranks - 1),
    "dualpipev": Generator(dualpipev, "v", stages=(2, 2), fill=lambda ranks: 2 * ranks),
    "dualpipev_paired": Generator(dualpipev, "v", stages=(2, 2), fill=lambda ranks: 2 * ranks, paired=True),
    "v_half": Generator(v_half, "v", stages=(2, 2)),
}
DEFAULT = "1f1b"
"""The default schedule. It has one stage per rank, so it also stands for no pipeline at all."""


def build(name: str, ranks: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """Builds the schedule `name` for any number of ranks and microbatches. virtual_stages: stages per rank. If a
    schedule allows only one number, 1 (a layout's default) stands for it.

    Raises:
        UserError: names the layout's field, its value and the nearest valid one.
    """
    chunks = stages_per_rank(name, virtual_stages)
    for field, value in (("pp", ranks), ("microbatches", microbatches)):
        if value < 1:
            raise UserError(f"layout.{field}: {value} is not possible with a pipeline; must be at least 1")
    rows = tuple(tuple(build_row(name, rank, ranks, microbatches, chunks)) for rank in range(ranks))
    made = SCHEDULES[name]
    return Schedule(name, microbatches, place(made.placement, ranks, chunks), rows, made.paired)


def build_row(name: str, rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """One rank's computations under schedule `name`, with `chunks` stages per rank."""
    made = SCHEDULES[name]
    # A schedule stays in order if some microbatches are left out, so build enough and drop the surplus.
    enough = max(microbatches, made.fill(ranks))
    row = made.row(rank, ranks, enough, chunks)
    return row if enough == microbatches else [action for action in row if action.microbatch < microbatches]


def stages_per_rank(name: str, virtual_stages: int) -> int:
    """The number of stages per rank under schedule `name`, given the layout's `virtual_stages`.

    Raises:
        UserError: there is no such schedule, or it does not allow that number.
    """
    if name not in SCHEDULES:
        known = ", ".join(SCHEDULES)
        raise UserError(
            f"layout.schedule: '{name}' is unknown{did_you_mean(name, SCHEDULES)} (valid: {known})"
        )
    least, most = SCHEDULES[name].stages
    if least == most and virtual_stages == 1:
        return least
    if virtual_stages < least or (most and virtual_stages > most):
        allowed = f"{'exactly' if least == most else 'at least'} {several(least, 'stage')}"
        other = f", or schedule={SCHEDULES[name].instead}" if virtual_stages >= 1 else ""
        raise UserError(
            f"layout.virtual_stages: schedule '{name}' needs {allowed} per rank, not "
            f"{virtual_stages}. Nearest valid: virtual_stages={least}{other}"
        )
    return virtual_stages
