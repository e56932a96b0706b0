"""The training loop.

A step reads the microbatches of this rank and runs forward and backward for each. Gradients accumulate in fp32 and are
summed over the ranks while the last backward runs. Then the step clips and updates. When due, the loop validates,
samples and saves. What a step found out is read and recorded while the next one runs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from typing import Any, Protocol

from torch import Tensor

from fivefold.comm.progress import progress
from fivefold.errors import UserError
from fivefold.parallel.pipeline import Microbatch
from fivefold.recipe import Recipe, batch_size
from fivefold.step.state import State
from fivefold.step.step import Done, take_step

MAX_SKIPPED = 5  # steps in a row with a non-finite loss or gradient before the run stops


class Hooks(Protocol):
    """Calls of the loop around its steps. They do not change what is trained. `record` may average figures."""

    next_batch: Callable[[], tuple[list[Microbatch], float]]  # this rank's microbatches, seconds waited
    stop_wanted: Callable[[], bool]  # was this rank asked to stop?

    def begin_step(self) -> None:
        """The microbatches are there; the step is about to run."""
        ...

    def inspect(self) -> Mapping[str, Tensor]:
        """Returns further figures of the step: see `step.take_step`."""
        ...

    def end_step(self) -> dict[str, Any]:
        """The step is queued. Returns the figures that the host knows already."""
        ...

    def record(self, line: dict[str, Any], skipped: int) -> None:
        """Records the figures of a step, in order of steps. skipped: as in `step.Done`."""
        ...

    def validate(self, step: int) -> None: ...
    def sample(self, step: int) -> None: ...
    def save(self, step: int, ends: bool) -> None:
        """Saves the state. ends: no step follows, so it is saved when this returns, or this raises UserError."""
        ...


def train_loop(state: State, recipe: Recipe, hooks: Hooks, behind: int | None = None) -> bool:
    """Trains to the recipe's last step. Returns False if it was stopped before; the state is saved either way.

    behind: number of steps that may run on while the figures of an earlier one are not read. None: 1, but 0 on CPUs,
    where reading does not wait.

    Raises:
        UserError: loss or gradient stay not finite for MAX_SKIPPED steps.
    """
    train, first = recipe.train, True
    assert train.steps, "a resolved recipe has steps"
    progress.step = state.step
    if behind is None:
        behind = int(state.mesh.device.type != "cpu")
    with _Late(hooks, behind) as late:
        while state.step < train.steps:
            late.start()
            microbatches, waited = hooks.next_batch()
            traced = state.step + 1 == recipe.observe.trace_step
            if state.parallel.pipeline is not None:
                state.parallel.pipeline.recording = traced
            hooks.begin_step()
            slower = first or is_slower(recipe, state.step)
            with progress.phase("a slower step") if slower else nullcontext():
                done = take_step(state, recipe, microbatches, hooks.stop_wanted, hooks.inspect)
            first = False
            last, saving = state.step == train.steps, due(recipe.checkpoint.every, state.step)
            validating = last or due(train.val_every, state.step)
            sampling = last or due(train.sample_every, state.step)
            late.add(state.step, done, waited, at_once=saving or validating or sampling or traced)
            diverged = late.skipped >= MAX_SKIPPED
            if late.stop or diverged or last or saving:
                # Save first, because the sender of a signal may not wait long
                hooks.save(state.step, ends=late.stop or diverged or last)
            if diverged:
                raise UserError(
                    f"loss or gradient were not finite in {MAX_SKIPPED} steps in a row, up to step "
                    f"{late.read}: the run has diverged. These steps did not change the weights. Step {state.step} is "
                    "saved; resume with a smaller optim.lr or optim.grad_clip"
                )
            if late.stop:
                return last
            if validating:
                hooks.validate(state.step)
            if sampling:
                hooks.sample(state.step)
    return True


class _Late:
    """Reads the figures of a step while the device computes the next one.

    On a GPU the host runs ahead, and reading a step's figures is its only wait for the device. So it learns one step
    late that it shall stop, or that the run has diverged. A step takes from the end of the one before, or from its
    start if no other is under way, until it is done. read: the last step that was read while the run had not diverged,
    or that made it so.
    """

    def __init__(self, hooks: Hooks, behind: int) -> None:
        self.hooks, self.behind, self.began = hooks, behind, 0.0
        self.queued: deque[tuple[dict[str, Any], Done]] = deque()
        self.stop, self.skipped, self.read = False, 0, 0

    def start(self) -> None:
        """A step begins."""
        if not self.queued:
            self.began = time.perf_counter()

    def add(self, step: int, done: Done, waited: float, at_once: bool) -> None:
        """Queues a step, and records those before it. at_once: its own figures, too."""
        line: dict[str, Any] = {"step": step, "lr": done.lr, "data_wait_s": waited}
        self.queued.append((line, done))
        left = 0 if at_once else self.behind
        self._wait(left)
        line |= self.hooks.end_step()
        self._record(left)
        if self.stop or self.skipped >= MAX_SKIPPED:
            self._record(0)

    def _wait(self, left: int) -> None:
        """Waits for all steps but the last `left`, and takes their times."""
        for line, done in list(self.queued)[: len(self.queued) - left]:
            if "step_s" not in line:
                done.wait()
                now = time.perf_counter()
                line["step_s"], self.began = now - self.began, now
                progress.end_step(line["step"], line["step_s"], line["data_wait_s"])

    def _record(self, left: int) -> None:
        """Records all steps but the last `left`."""
        self._wait(left)
        while len(self.queued) > left:
            line, done = self.queued.popleft()
            if self.skipped < MAX_SKIPPED:
                self.skipped, self.read = done.skipped, line["step"]
            self.stop = self.stop or done.stop
            found = {"step": line["step"], "loss": done.loss, "grad_norm": done.norm, **line, **done.more}
            if done.seconds:
                found["rank_seconds"] = done.seconds
            self.hooks.record(found, done.skipped)

    def __enter__(self) -> _Late:
        return self

    def __exit__(self, *error: object) -> None:
        """An error in a step must not lose the line of the one before."""
        with suppress(Exception):
            self._record(0)


def is_slower(recipe: Recipe, step: int) -> bool:
    """True if a step (0, 1, ...) is measured, or compiles for batches of another size."""
    observe, train = recipe.observe, recipe.train
    measured = step + 1 in (observe.trace_step, observe.memory_step, observe.histogram_step)
    return measured or batch_size(train, step) != batch_size(train, max(0, step - 1))


def due(every: int, step: int) -> bool:
    """True if something that happens every `every` steps happens after this one. 0: never."""
    return every > 0 and step % every == 0
