"""What a computation waits for, what it makes, and going through a schedule in an order that follows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Literal, NamedTuple

from fivefold.schedules.pipeline.action import Action
from fivefold.schedules.pipeline.schedule import Schedule


class Result(NamedTuple):
    """The output of a stage, or the gradient of its input, for one microbatch."""

    what: Literal["output", "gradient"]
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"the {self.what} of stage {self.stage} for microbatch {self.microbatch}"


def makes(action: Action) -> Result | None:
    """What other computations may wait for; W makes nothing of the kind."""
    if action.kind == "W":
        return None
    return Result("output" if action.kind == "F" else "gradient", action.stage, action.microbatch)


def needs(action: Action, stages: int) -> list[Result]:
    """What must be there before a computation can start."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        return [Result("output", stage - 1, microbatch)] if stage > 0 else []
    if action.kind == "W":
        return [Result("gradient", stage, microbatch)]
    own = Result("output", stage, microbatch)
    return [own, Result("gradient", stage + 1, microbatch)] if stage < stages - 1 else [own]


def walk(schedule: Schedule, visit: Callable[[int, Action], None]) -> dict[int, tuple[Action, Result]]:
    """Calls visit(rank, action) for every computation, after all that it needs.

    Returns, for each rank that could not finish: the action at which it is stuck and what that waits for.
    """
    there: set[Result] = set()
    position = [0] * schedule.ranks
    waiting: dict[Result, list[int]] = defaultdict(list)
    ready = list(range(schedule.ranks))[::-1]
    stuck: dict[int, tuple[Action, Result]] = {}
    while ready:
        rank = ready.pop()
        stuck.pop(rank, None)
        while position[rank] < len(schedule.rows[rank]):
            action = schedule.rows[rank][position[rank]]
            missing = next((result for result in needs(action, schedule.stages) if result not in there), None)
            if missing:
                waiting[missing].append(rank)
                stuck[rank] = (action, missing)
                break
            visit(rank, action)
            position[rank] += 1
            if result := makes(action):
                there.add(result)
                ready += waiting.pop(result, [])
    return stuck
