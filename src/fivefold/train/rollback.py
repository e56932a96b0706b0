"""Going back after a fault: the newest valid checkpoint before it is loaded in place, checkpoints after that one are
set aside, and the data in between are left out.

RUN/rollbacks.json says what was left out, and checkpoints repeat it. So every resume takes the same data, from
whichever checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fivefold.checkpoint import keep, store
from fivefold.comm import all_or_none, told
from fivefold.comm.progress import progress
from fivefold.errors import UserError
from fivefold.files import read_json, write_atomically
from fivefold.observe.faults import ROLLBACK
from fivefold.recipe import FaultsSection, leave_out
from fivefold.step.state import State
from fivefold.train.checked import assert_same
from fivefold.train.faults import Fault
from fivefold.train.hooks import RunHooks
from fivefold.train.job import Job
from fivefold.train.loop import train_loop
from fivefold.train.resume import load_newest
from fivefold.train.share import reader

FILE = "rollbacks.json"


def train(state: State, job: Job, hooks: RunHooks) -> bool:
    """Trains to the recipe's last step, and goes back where the recipe says so. Returns False if it was stopped before.

    Raises:
        UserError: a fault that ends the run.
    """
    _begin(state, job, hooks)
    while True:
        with reader(job, state.mesh, state.step, state.left_out) as hooks.next_batch:
            try:
                return train_loop(state, job.recipe, hooks)
            except Fault as found:
                hooks.settle()  # a save that is on its way may hold the newest good state
                if found.act != "rollback":
                    raise found.ended(job.out) from None
                fault = found
        with progress.phase("going back"):
            go_back(state, job, hooks, fault)


def goes_back(faults: FaultsSection) -> bool:
    """True if any policy goes back to a checkpoint."""
    return "rollback" in (faults.on_nonfinite, faults.on_spike, faults.on_corruption)


def _begin(state: State, job: Job, hooks: RunHooks) -> None:
    """Takes up what the run has left out before, and makes sure that there is a checkpoint to go back to."""
    run = state.mesh.axis("run")
    past: dict[str, Any] = {}
    with all_or_none(run):
        past = read(job.out) if run.index == 0 else {}
    past = json.loads(told(json.dumps(past), 0, run))
    state.rollbacks = [(int(step), int(to)) for step, to in past["rollbacks"]]
    state.left_out = [(int(step), int(size)) for step, size in past["left_out"]] or state.left_out
    if goes_back(job.recipe.faults) and state.step == 0:
        hooks.save(0, ends=True)  # a save that fails is an error here: there would be nothing to go back to


def read(out: Path) -> dict[str, Any]:
    """RUN/rollbacks.json: "rollbacks", pairs of the step of a fault and the one that the run went back to, and
    "left_out", as in `State`.

    Raises:
        UserError: it is damaged.
    """
    path = out / FILE
    try:
        past = read_json(path)
        pairs = [*past["rollbacks"], *past["left_out"]]
        if all(isinstance(n, int) and n >= 0 for first, second in pairs for n in (first, second)):
            return past
    except FileNotFoundError:
        return {"rollbacks": [], "left_out": []}
    except (OSError, UserError, ValueError, LookupError, TypeError):
        pass
    raise UserError(f"{path} is damaged: it says which data the run leaves out, so it cannot resume exactly")


def go_back(state: State, job: Job, hooks: RunHooks, fault: Fault) -> None:
    """Loads the newest valid checkpoint that the fault leaves. If the run went back to that one the last time, it takes
    the one before: the cause may lie before it.

    Raises:
        UserError: there is none, or the run has gone back too often.
    """
    most = job.recipe.faults.rollbacks
    if len(state.rollbacks) >= most:
        raise UserError(
            f"{fault.said}. The run has gone back {len(state.rollbacks)} times, and faults.rollbacks = {most} allows "
            "no more"
        )
    rollbacks, left_out, run = state.rollbacks, state.left_out, state.mesh.axis("run")
    damaged = _load_before(state, job, fault, rollbacks[-1][1] if rollbacks else None)
    step = hooks.right = state.step
    state.rollbacks, state.left_out = [*rollbacks, (fault.step, step)], left_out
    how = "takes the same data again"
    if fault.leaves_out:
        state.left_out = leave_out(job.recipe.train, left_out, step, fault.step)
        how = f"leaves out the data of steps {step + 1} to {fault.step}"
    with all_or_none(run):
        if run.index == 0:
            # First: whoever is killed here goes back again. The run does not come to these checkpoints any more
            for folder in store.checkpoints(job.out):
                if store.step_in(folder) > step:
                    keep.set_aside(folder, keep.LATER)
            text = {"rollbacks": state.rollbacks, "left_out": list(state.left_out)}
            write_atomically(job.out / FILE, json.dumps(text))
            if hooks.metrics is not None:
                hooks.metrics.rewind(step)
                hooks.metrics.write({"step": step, ROLLBACK: {"from": fault.step, "why": fault.said}})
    for line in damaged:
        hooks.console.warn(line)
    hooks.console.warn(f"{fault.said}. The run goes back to step {step}, and {how}")


def _load_before(state: State, job: Job, fault: Fault, last: int | None) -> list[str]:
    """Loads a checkpoint. Returns what is wrong with newer ones. last: the step to which the run went back before."""
    run, found = state.mesh.axis("run"), list[Path]()
    with all_or_none(run):
        found = [folder for folder in store.checkpoints(job.out) if store.step_in(folder) <= fault.back_to]
    assert_same(found[::-1], state.mesh)
    if len(found) > 1 and store.step_in(found[-1]) == last:
        found.pop()
    if state.outer is not None:
        state.outer.forget()
    checkpoint, damages = load_newest(state, job, found[::-1])
    if checkpoint is None:
        raise UserError(
            f"{fault.said}. There is no valid checkpoint up to step {fault.back_to} to go back to"
            + "".join(f". {line}" for line in damages.values())
        )
    return list(damages.values())
