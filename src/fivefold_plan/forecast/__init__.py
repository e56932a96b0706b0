"""What the trainer asks the planner: the functions of `fivefold.train.forecast.Forecast`. No torch until it
is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fivefold.recipe import Recipe
from fivefold.train.forecast import Chosen, Held, Room
from fivefold_plan.predict import budget, planned_window, predict, priced_here

if TYPE_CHECKING:
    from fivefold.launch.ranks import Ranks
    from fivefold.step.state import State
    from fivefold.train.job import Job
    from fivefold_plan.forecast.run import Prediction
    from fivefold_plan.trace.memory import Tracker


def choose(recipe: Recipe, gpu: str = "", measured: bool = True) -> Chosen:
    """See `Forecast.choose`."""
    prices, layout = priced_here(gpu, measured), recipe.layout
    window = layout.offload_window or planned_window(recipe, *prices)
    layout = layout.model_copy(update={"offload_window": window})
    found = budget(recipe.model_copy(update={"layout": layout}), *prices)
    if found is None:
        return Chosen(window, layout.recompute)
    return Chosen(window, found.recompute, found.line(layout.recompute), round(found.peak))


def on_cpus(recipe: Recipe) -> tuple[int, int]:
    """See `Forecast.on_cpus`."""
    cluster, software = priced_here()
    plan = predict(recipe, replace(cluster, devices=None), software)
    return plan.peak_bytes, plan.ranks


def of_run(job: Job, ranks: Ranks, start: int) -> Prediction:
    """See `Forecast.of_run`."""
    from fivefold_plan.forecast.run import Prediction

    return Prediction(job, ranks, start)


def add_exact(job: Job) -> None:
    """See `Forecast.add_exact`."""
    from fivefold_plan.forecast import run

    run.add_exact(job)


def remedies(job: Job, room: Room, local_ranks: int, base: int, held: Held | None) -> list[str]:
    """See `Forecast.remedies`."""
    from fivefold_plan.forecast import memory

    return memory.remedies(job, room, local_ranks, base, held)


def tracker(state: State, device: str) -> Tracker:
    """See `Forecast.tracker`."""
    from fivefold_plan.trace.memory import Tracker, states_of

    return Tracker(states_of(state), on=device)
