"""The training loop.

A step reads the microbatches of this rank and runs forward and backward for each. Gradients accumulate in fp32 and are
summed over the ranks while the last backward runs. Then the step clips and updates. When due, the loop validates,
samples and saves. What a step found out is read and recorded while the next one runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch

from fivefold.comm.progress import progress, span
from fivefold.errors import UserError
from fivefold.recipe import Recipe, batch_size
from fivefold.recipe.entries import steps
from fivefold.step.state import State
from fivefold.step.step import Done, moment, seconds_between, take_step
from fivefold.train.faults import Fault, judged, weights_fault
from fivefold.train.hooks import SAMPLE, VAL_LOSS, RunHooks, due


def train_loop(
    state: State,
    recipe: Recipe,
    hooks: RunHooks,
    behind: int | None = None,
    take: Callable[..., Done] | None = None,
) -> bool:
    """Trains to the recipe's last step. Returns False if it was stopped before, or before the last step's validation
    and sample; the state is saved either way.

    hooks: what happens around the steps. It does not change what is trained. behind: number of steps that may run on
    while the figures of an earlier one are not read. None: 1, but 0 on CPUs, where reading does not wait. take: in
    place of `take_step`, where other ranks compute. Raises Fault: a number that is not finite, a spike, or a difference
    between ranks. What the recipe wants is to go back, or to end."""
    train, first = recipe.train, True
    assert train.steps, "a resolved recipe has steps"
    progress.step, observe = state.step, recipe.observe
    looked_into = {observe.memory_step, observe.histogram_step, *steps(observe.profile_steps)}
    if behind is None:
        behind = int(state.mesh.device.type != "cpu")
    clock = state.mesh.device if take is None else torch.device("cpu")
    if state.step:  # a stop or a kill may have come between the save of this step and what is due after it
        _observe(hooks, recipe, state.step, there=hooks.written(state.step))
    with _Late(hooks, behind, recipe, clock) as late, names_step(state):
        while state.step < train.steps:
            late.start()
            traced = state.step + 1 == recipe.observe.trace_step
            # It is measured, or compiles for batches or windows of another size
            slower = first or traced or state.step + 1 in looked_into
            if train.batch_ramp:
                slower = slower or batch_size(train, state.step) != batch_size(train, max(0, state.step - 1))
            slower = slower or len({recipe.model.ramped(state.step - before) for before in (0, 1)}) > 1
            with progress.phase("a slower step") if slower else nullcontext():
                with span("wait for data"):
                    microbatches, waited = hooks.next_batch()  # the first may open files
                hooks.begin_step(microbatches)
                done = (take or take_step)(
                    state, recipe, microbatches, hooks.stop_wanted, hooks.inspect, hooks.save_wanted
                )
            first = False
            last, saving = state.step == train.steps, hooks.save_due(state.step)
            observed = last or due(train.val_every, state.step) or due(train.sample_every, state.step)
            late.add(state.step, done, waited, at_once=saving or observed or traced)
            ends, saving = late.stop or last, saving or late.save
            _raise_fault(state, recipe, hooks, late, look=ends or saving or late.bad)
            if ends or saving:
                hooks.save(state.step, ends=ends)  # first, because the sender of a signal may not wait long
            if late.stop:
                return False
            _observe(hooks, recipe, state.step)
    return True


def _observe(hooks: RunHooks, recipe: Recipe, step: int, there: Container[str] = ()) -> None:
    """Validates and samples after a step if that is due. there: keys of its lines that are written."""
    last, train = step == recipe.train.steps, recipe.train
    if (last or due(train.val_every, step)) and VAL_LOSS not in there:
        hooks.validate(step)
    if (last or due(train.sample_every, step)) and SAMPLE not in there:
        hooks.sample(step)


def _raise_fault(state: State, recipe: Recipe, hooks: RunHooks, late: _Late, look: bool) -> None:
    """Raises what is wrong after a step, if anything is. An end that leaves good weights saves them first. look: at the
    weights, too, because they are about to be saved."""
    fault = late.fault or hooks.compare(state.step)
    if look and (fault is None or (fault.act == "abort" and fault.good)):
        fault = weights_fault(state, recipe.faults) or fault
    if fault is None:
        return
    if fault.act == "abort" and fault.good:
        try:
            hooks.save(state.step, ends=True, waits=False)  # an error must not wait
        except UserError as error:
            message = f"{fault.said}. The run ends here, and this step could not be saved: {error}"
            raise Fault(fault.step, message, fault.act, fault.back_to) from error
    raise fault


@contextmanager
def names_step(state: State) -> Iterator[None]:
    """An error's traceback ends with the step after which it came. A launcher compares it with the one before."""
    try:
        yield
    except Exception as error:
        error.add_note(f"after step {state.step}")
        raise


class _Late:
    """Reads the figures of a step while the device computes the next one.

    On a GPU the host runs ahead, and reading a step's figures is its only wait for the device. So it learns one step
    late that it shall stop, or that something is wrong. A step takes from the end of the one before, or from its start
    if no other is under way, until it is done. fault: the first one. bad: True if loss or gradient of the last step
    that was read were not finite. save: a checkpoint is due by time, in a step that was read last. clock: the device
    that computes the figures.
    """

    def __init__(self, hooks: RunHooks, behind: int, recipe: Recipe, clock: torch.device) -> None:
        self.hooks, self.behind, self.recipe, self.clock = hooks, behind, recipe, clock
        self.began: Any = 0.0
        self.queued: deque[tuple[dict[str, Any], Done]] = deque()
        self.stop, self.save, self.bad = False, False, False
        self.fault: Fault | None = None

    def start(self) -> None:
        """A step begins."""
        if not self.queued:
            self.began = moment(self.clock)

    def add(self, step: int, done: Done, waited: float, at_once: bool) -> None:
        """Queues a step, and records those before it. at_once: its own figures, too."""
        line: dict[str, Any] = {"step": step, "lr": done.lr, "data_wait_s": waited}
        self.queued.append((line, done))
        left, self.save = 0 if at_once else self.behind, False
        self._wait(left)
        line |= self.hooks.end_step()
        self._record(left)
        if self.stop or self.save or self.fault is not None:
            self._record(0)

    def _wait(self, left: int) -> None:
        """Waits for all steps but the last `left`, and takes their times."""
        for line, done in list(self.queued)[: len(self.queued) - left]:
            if "step_s" not in line:
                done.wait()
                end = done.end
                line["step_s"], self.began = seconds_between(self.began, end), end
                progress.end_step(line["step"], line["step_s"], line["data_wait_s"])

    def _record(self, left: int) -> None:
        """Records all steps but the last `left`."""
        self._wait(left)
        while len(self.queued) > left:
            line, done = self.queued.popleft()
            self.stop, self.save = self.stop or done.stop, self.save or done.save
            self.bad = done.skipped > 0
            found = {"step": line["step"], "loss": done.loss, "grad_norm": done.norm, **line, **done.more}
            if done.seconds:
                found["rank_seconds"] = done.seconds
            self.fault = self.fault or judged(self.recipe, found, done.skipped)
            self.hooks.record(found)

    def __enter__(self) -> _Late:
        return self

    def __exit__(self, *error: object) -> None:
        """An error in a step must not lose the line of the one before."""
        with suppress(Exception):
            self._record(0)
