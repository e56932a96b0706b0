"""The training loop.

A step reads the microbatches of this rank and runs forward and backward for each. Gradients accumulate in fp32 and are
summed over the ranks while the last backward runs. Then the step clips and updates. When due, the loop validates,
samples and saves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from fivefold.errors import UserError
from fivefold.parallel.pipeline import Microbatch
from fivefold.recipe import Recipe
from fivefold.step.state import State
from fivefold.step.step import take_step

MAX_SKIPPED = 5  # steps in a row with a non-finite gradient before the run stops


class Hooks(Protocol):
    """Calls of the loop around its steps. They do not change what is trained. `record` may average figures."""

    next_batch: Callable[[], tuple[list[Microbatch], float]]  # this rank's microbatches, seconds waited
    stop_wanted: Callable[[], bool]  # was this rank asked to stop?

    def begin_step(self) -> None:
        """The microbatches are there; the step is about to run."""
        ...

    def record(self, line: dict[str, Any]) -> None:
        """Records the figures of a finished step."""
        ...

    def validate(self, step: int) -> None: ...
    def sample(self, step: int) -> None: ...
    def save(self, step: int) -> None: ...


def train_loop(state: State, recipe: Recipe, hooks: Hooks) -> bool:
    """Trains to the recipe's last step. Returns False if it was stopped before; the state is saved either way.

    Raises:
        UserError: the gradient stays not finite for MAX_SKIPPED steps.
    """
    train = recipe.train
    assert train.steps, "a resolved recipe has steps"
    while state.step < train.steps:
        began = time.perf_counter()
        microbatches, waited = hooks.next_batch()
        if state.parallel.pipeline is not None:
            state.parallel.pipeline.recording = state.step + 1 == recipe.observe.trace_step
        hooks.begin_step()
        done = take_step(state, recipe, microbatches, hooks.stop_wanted)
        stop = done.stop
        hooks.record(
            {
                "step": state.step,
                "loss": done.loss,
                "grad_norm": done.norm,
                "lr": done.lr,
                "data_wait_s": waited,
            }
            | (state.parallel.balance.figures if state.parallel.balance else {})
            | {"step_s": time.perf_counter() - began}
        )
        diverged, last = state.skipped >= MAX_SKIPPED, state.step == train.steps
        if stop or diverged or last or due(recipe.checkpoint.every, state.step):
            hooks.save(state.step)  # save first, because the sender of a signal may not wait long
        if diverged:
            raise UserError(
                f"the gradient was not finite in {MAX_SKIPPED} steps in a row, up to step {state.step}: the run has "
                "diverged. The weights before these steps are saved; resume with a smaller optim.lr or optim.grad_clip"
            )
        if stop:
            return last
        if last or due(train.val_every, state.step):
            hooks.validate(state.step)
        if last or due(train.sample_every, state.step):
            hooks.sample(state.step)
    return True


def due(every: int, step: int) -> bool:
    """True if something that happens every `every` steps happens after this one. 0: never."""
    return every > 0 and step % every == 0
