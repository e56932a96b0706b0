"""The schedules that a recipe can name, and building one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fivefold.errors import UserError, did_you_mean
from fivefold.schedules.pipeline.action import Action
from fivefold.schedules.pipeline.breadth_first import breadth_first
from fivefold.schedules.pipeline.dualpipev import dualpipev
from fivefold.schedules.pipeline.one_f_one_b import interleaved, one_f_one_b
from fivefold.schedules.pipeline.schedule import Placement, Schedule, place
from fivefold.schedules.pipeline.zero_bubble import zb_h1, zbv


@dataclass(frozen=True)
class Generator:
    """How a schedule is made.

    row: (rank, ranks, microbatches, stages a rank) -> the rank's computations. stages: how many a rank may
    have, fewest and most (None: any number). instead: the schedule for another number. fill: microbatches that
    `row` needs at least, given the ranks.
    """

    row: Callable[[int, int, int, int], list[Action]]
    placement: Placement = "loop"
    stages: tuple[int, int | None] = (1, 1)
    instead: str = "interleaved"
    fill: Callable[[int], int] = lambda ranks: 1


SCHEDULES = {
    "gpipe": Generator(breadth_first, instead="looped_bfs"),
    "1f1b": Generator(one_f_one_b),
    "interleaved": Generator(interleaved, stages=(2, None), instead="1f1b"),
    "looped_bfs": Generator(breadth_first, stages=(2, None), instead="gpipe"),
    "zb_h1": Generator(zb_h1),
    "zbv": Generator(zbv, "v", stages=(2, 2), fill=lambda ranks: 2 * ranks - 1),
    "dualpipev": Generator(dualpipev, "v", stages=(2, 2), fill=lambda ranks: 2 * ranks),
}


def build(name: str, ranks: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """The schedule `name` for any number of ranks and microbatches. `virtual_stages`: stages a rank; `zbv` and
    `dualpipev` always have 2, whether 1 (what a layout has by default) or 2 is given.

    Raises:
        UserError: naming the layout's field, the value and the nearest one that is valid.
    """
    chunks = stages_a_rank(name, virtual_stages)
    for field, value in (("pp", ranks), ("microbatches", microbatches)):
        if value < 1:
            raise UserError(f"layout.{field}: {value} is not possible with a pipeline; at least 1")
    made = SCHEDULES[name]
    # A schedule stays in order if some microbatches are left out, so too few are a part of enough.
    enough = max(microbatches, made.fill(ranks))
    rows = (made.row(rank, ranks, enough, chunks) for rank in range(ranks))
    kept = tuple(tuple(action for action in row if action.microbatch < microbatches) for row in rows)
    return Schedule(name, microbatches, place(made.placement, ranks, chunks), kept)


def stages_a_rank(name: str, virtual_stages: int) -> int:
    """How many stages a rank gets under schedule `name` if the layout says `virtual_stages`.

    Raises:
        UserError: if there is no such schedule, or it does not allow that number.
    """
    if name not in SCHEDULES:
        known = ", ".join(SCHEDULES)
        raise UserError(
            f"layout.schedule: '{name}' is not known{did_you_mean(name, SCHEDULES)} (one of {known})"
        )
    least, most = SCHEDULES[name].stages
    if least == most and virtual_stages == 1:
        return least
    if virtual_stages < least or (most and virtual_stages > most):
        allowed = f"exactly {least}" if least == most else f"at least {least}"
        other = f", or schedule={SCHEDULES[name].instead}" if virtual_stages >= 1 else ""
        raise UserError(
            f"layout.virtual_stages: {virtual_stages} stage(s) a rank do not go with schedule '{name}', which has "
            f"{allowed}. Nearest valid: virtual_stages={least}{other}"
        )
    return virtual_stages
