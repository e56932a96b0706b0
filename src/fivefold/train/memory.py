"""Memory over the steps of a run that `observe.memory_step` names: bytes by category on CPUs, PyTorch's own snapshot on
GPUs. Both go into RUN/traces."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from fivefold.files import make_folder
from fivefold.host.machine import peak_memory_bytes
from fivefold.launch.ranks import Ranks
from fivefold.observe import memory_picture
from fivefold.step.state import State
from fivefold.trace import private
from fivefold.trace.memory import Tracker, states_of
from fivefold.train.job import Job


class MemoryWatch:
    """One rank's part: begin and end each step with it. peak: most bytes of tensors at once in the later step."""

    def __init__(self, job: Job, ranks: Ranks, start: int):
        self.job, self.ranks = job, ranks
        later = job.recipe.observe.memory_step
        self.first = start + 1
        self.steps = {self.first, later} if later else set()
        self.tracking = ExitStack()
        self.tracker: Tracker | None = None
        self._peak: int | None = None

    @property
    def peak(self) -> int | None:
        """Most bytes of tensors at once in a step; None if they were not tracked."""
        return self._peak if self.ranks.device.type == "cpu" else peak_memory_bytes(str(self.ranks.device))

    def begin_step(self, state: State) -> None:
        """Tracks the step if it is one of those wanted. A user's own module is not tracked: what it keeps is not known.
        Nor are tensors on GPUs, which would change their compiled code: PyTorch notes their memory itself."""
        if state.step + 1 not in self.steps:
            return
        if self.ranks.device.type == "cpu":
            if self.job.module is not None:
                return
            self.tracker = self.tracking.enter_context(Tracker(states_of(state)))
        else:
            private.start_memory_history()

    def begin_update(self) -> None:
        if self.tracker is not None:
            self.tracker.begin_update()

    def end_step(self, step: int) -> Path | None:
        """Ends a step. Returns the file that it wrote."""
        self.tracking.close()
        if self.tracker is not None:
            timeline = self.tracker.timeline(rank=self.ranks.rank, step=step)
            if step > 1:  # the first step has no states of the optimizer
                self._peak = self.tracker.peak().total
            self.tracker = None
            return memory_picture.write(self.job.out, timeline)
        if self.ranks.device.type != "cpu" and step in self.steps:
            name = f"memory-snapshot-step-{step:08d}-rank-{self.ranks.rank}.pickle"
            folder = self.job.out / "traces"
            make_folder(folder)
            private.write_memory_snapshot(str(folder / name))
            return folder / name
        return None
