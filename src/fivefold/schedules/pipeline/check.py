"""Proves that a schedule can run, and that it trains on every microbatch once."""

from __future__ import annotations

from fivefold.errors import UserError
from fivefold.schedules.pipeline.facts import peak_live
from fivefold.schedules.pipeline.schedule import Action, Schedule


def check(schedule: Schedule) -> list[float]:
    """Checks the computations. Returns each rank's largest number of live activations, in microbatches times stages.

    Raises:
        UserError: names the action that is duplicated, missing, on the wrong rank, or waits forever.
    """
    places: dict[Action, int] = {}
    for rank, row in enumerate(schedule.rows):
        for place, action in enumerate(row):
            if problem := _problem(schedule, rank, action):
                raise wrong(schedule, f"{action} {problem}")
            if action in places:
                raise wrong(schedule, f"{action} is there twice")
            places[action] = place
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            _check_once(schedule, stage, microbatch, places)
    _check_order_of_losses(schedule)
    if stuck := sorted(schedule.walked.stuck.items()):
        waits = "; ".join(
            f"rank {rank} at {action} for the {what} of stage {stage} for microbatch {microbatch}"
            for rank, (action, (what, stage, microbatch)) in stuck
        )
        raise wrong(schedule, f"it comes to a halt: waiting are {waits}")
    return peak_live(schedule)


def wrong(schedule: Schedule, message: str) -> UserError:
    """An error in a schedule."""
    return UserError(f"schedule '{schedule.name}': {message}")


def _problem(schedule: Schedule, rank: int, action: Action) -> str:
    """What is wrong with an action on a rank: it is no computation, or its stage or microbatch is not the rank's."""
    if not action.computes:
        return f"on rank {rank} is a transfer; those are added later"
    if action.stage >= schedule.stages:
        return f"on rank {rank}: the last of {schedule.stages} stages is {schedule.stages - 1}"
    if action.microbatch >= schedule.microbatches:
        return (
            f"on rank {rank}: the last of {schedule.microbatches} microbatches is {schedule.microbatches - 1}"
        )
    owner = schedule.rank_of[action.stage]
    return f"is on rank {rank}, but stage {action.stage} is on rank {owner}" if owner != rank else ""


def _check_once(schedule: Schedule, stage: int, microbatch: int, places: dict[Action, int]) -> None:
    """Requires one F, and either one B or one I with one W later."""
    forward, whole, inputs, weights = (Action(stage, kind, microbatch) for kind in ("F", "B", "I", "W"))
    if forward not in places:
        raise wrong(schedule, f"{forward} is missing")
    if whole in places:
        for part in (inputs, weights):
            if part in places:
                raise wrong(schedule, f"{part} is there beside {whole}, which contains it")
    elif inputs not in places and weights not in places:
        raise wrong(schedule, f"{whole} is missing (or {inputs} and {weights})")
    elif inputs not in places or weights not in places:
        there, absent = (inputs, weights) if inputs in places else (weights, inputs)
        raise wrong(schedule, f"{absent} is missing: {there} is only one part of a backward")
    elif places[weights] < places[inputs]:
        raise wrong(schedule, f"{weights} comes before {inputs}")


def _check_order_of_losses(schedule: Schedule) -> None:
    """Requires microbatches in order at the last stage: PyTorch's runtime counts losses in order of arrival."""
    last = schedule.stages - 1
    row = schedule.rows[schedule.rank_of[last]]
    forwards = [action for action in row if (action.stage, action.kind) == (last, "F")]
    for number, action in enumerate(forwards):
        if action.microbatch != number:
            due = Action(last, "F", number)
            raise wrong(schedule, f"{action} comes before {due}: the last stage meets microbatches in order")
