"""Tracks the tensors of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from fivefold.files import make_folder
from fivefold.host.machine import peak_memory_bytes
from fivefold.launch.ranks import Ranks
from fivefold.observe import memory_picture
from fivefold.parallel.mesh import Microbatch
from fivefold.step.state import State
from fivefold.train.forecast import Tracked, forecast
from fivefold.train.instruments import Instrument
from fivefold.train.job import Job

HISTORY = 200_000
"""Allocations that a memory snapshot of a GPU holds at most."""


class MemoryWatch(Instrument):
    """Tracks the tensors of two steps: the first one, and `observe.memory_step`. peak: most bytes of tensors at once in
    a step; None if they were not tracked.

    A user's own module is not tracked: what it keeps is not known. Nor are tensors on GPUs, which would change their
    compiled code: PyTorch notes their memory itself.
    """

    def __init__(self, job: Job, ranks: Ranks, start: int):
        self.job, self.ranks, self.on_cpu = job, ranks, ranks.device.type == "cpu"
        later = job.recipe.observe.memory_step
        self.steps = {start + 1, later} if later else set()
        self.tracking = ExitStack()
        self.tracker: Tracked | None = None
        self._peak: int | None = None
        if self.steps and self.on_cpu:
            forecast()  # without the planner it is refused now

    @property
    def peak(self) -> int | None:
        return self._peak if self.on_cpu else peak_memory_bytes(str(self.ranks.device))

    def begin_step(self, state: State, microbatches: Sequence[Microbatch]) -> None:
        if state.step + 1 not in self.steps:
            return
        if not self.on_cpu:
            torch.cuda.memory._record_memory_history(max_entries=HISTORY, stacks="python")  # C++ is slow
            self.tracking.callback(torch.cuda.memory._record_memory_history, enabled=None)
        elif self.job.module is None:
            self.tracker = self.tracking.enter_context(forecast().tracker(state, "cpu"))

    def begin_update(self, state: State) -> Mapping[str, Tensor]:
        if self.tracker is not None:
            self.tracker.begin_update()
        return {}

    def end_step(self, state: State) -> str:
        step, rank = state.step, self.ranks.rank
        if self.tracker is not None:
            self.tracking.close()
            if step > 1:  # the first step has no states of the optimizer
                self._peak = self.tracker.peak().total
            path = memory_picture.write(self.job.out, self.tracker.timeline(rank=rank, step=step))
            self.tracker = None
        elif not self.on_cpu and step in self.steps:
            folder = self.job.out / "traces"
            make_folder(folder)
            path = folder / f"memory-snapshot-step-{step:08d}-rank-{rank}.pickle"
            with self.tracking:  # ends the recording, which drops what is not written
                # For https://pytorch.org/memory_viz. The file is a pickle; this program never reads one.
                torch.cuda.memory._dump_snapshot(str(path))
        else:
            return ""
        return f"memory over step {step}: {path}"

    def close(self) -> None:
        self.tracking.close()
