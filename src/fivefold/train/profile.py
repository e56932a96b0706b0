"""Steps that a rank looks into: memory over a step (`observe.memory_step`), and steps under PyTorch's profiler
(`observe.profile_steps`). Both write into RUN/traces."""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile

from fivefold.comm.progress import progress, span
from fivefold.files import NO_ROOM, make_folder, own_word, remove, rename, stream
from fivefold.host.machine import peak_memory_bytes
from fivefold.launch.ranks import Ranks
from fivefold.observe import memory_picture
from fivefold.observe.step_timeline import LONGEST, Operator, trace_name, write_operators
from fivefold.recipe.entries import steps
from fivefold.step.state import State
from fivefold.trace import private
from fivefold.trace.memory import Tracker, states_of
from fivefold.train.job import Job

QUIET = "KINETO_LOG_LEVEL", "6"
"""Kineto's logger notes each profile on stderr. On GPUs it may say why kernels are missing."""
PRIVATE = re.compile(rb'("(?:host_name|traceName)": )"(?:[^"\\]|\\.)*"')
"""What a trace says of the machine. No host names and paths are written into run folders (SECURITY.md)."""


class ProfileWatch:
    """One rank's part: begin and end each step with it, and close it."""

    def __init__(self, job: Job, ranks: Ranks):
        self.folder, self.ranks = job.out / "traces", ranks
        wanted, most = steps(job.recipe.observe.profile_steps), job.recipe.train.steps or 0
        self.steps = wanted[: most - wanted.start + 1] if wanted.start <= most else range(0)
        self.running: profile | None = None
        self.first = 0  # of the steps that are recorded
        self._step = ExitStack()

    def begin_step(self, step: int) -> None:
        """The step (1, 2, ...) is about to run."""
        if step not in self.steps:
            return self.close()  # the run has gone back to a step before them
        if self.running is None:
            activities, cuda = [ProfilerActivity.CPU], self.ranks.device.type == "cuda"
            if cuda:
                activities.append(ProfilerActivity.CUDA)
            else:
                os.environ.setdefault(*QUIET)
            self.running, self.first = profile(activities=activities, record_shapes=True), step
            self.running.start()
            progress.profiling = True
        self._step.enter_context(span("step", step))

    def end_step(self, step: int) -> str:
        """The step is queued. Returns what the console shall say."""
        self._step.close()
        recorded = self.running
        if recorded is None or step < self.steps[-1]:
            return ""
        with progress.phase("writing the profile"):
            self._stop(recorded)
            try:
                return self._write(recorded, step)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                return f"WARNING: the profile is not written: {error.strerror}"

    def close(self) -> None:
        """Ends a recording that has not come to its last step. It is not written."""
        self._step.close()
        if self.running is not None:
            self._stop(self.running)

    def _stop(self, recorded: profile) -> None:
        self.running, progress.profiling = None, False
        recorded.stop()  # waits for the GPU

    def _write(self, recorded: profile, last: int) -> str:
        make_folder(self.folder)
        path = self.folder / trace_name(self.first, last, self.ranks.rank)
        exported = self.folder / f".{path.name}.{own_word()}"
        try:
            recorded.export_chrome_trace(str(exported))
            _compress(exported, path)
        finally:
            remove(exported)
        if not self.ranks.first:
            return ""
        longest = operators(recorded.key_averages(), self.ranks.device.type == "cuda")
        write_operators(self.folder.parent, self.first, last, longest)
        return f"profile of steps {self.first} to {last}: {path}, for ui.perfetto.dev; each rank has one"


def operators(averages: Iterable[FunctionEventAvg], cuda: bool) -> list[Operator]:
    """The operators that took longest by themselves: on a GPU its kernels, else the CPU's. Spans are not operators. (An
    operator of the CPU has its kernels' time, too, and would count it twice.)"""
    where = DeviceType.CUDA if cuda else DeviceType.CPU
    found: list[Operator] = []
    for one in averages:
        if one.device_type == where and not one.is_user_annotation:
            us = one.self_device_time_total if cuda else one.self_cpu_time_total
            found.append(Operator(str(one.key), one.count, us / 1e6))
    whole = sum(one.seconds for one in found)
    longest = sorted(found, key=lambda one: -one.seconds)[:LONGEST]
    return [one._replace(share=one.seconds / whole) for one in longest if one.seconds > 0]


def _compress(source: Path, target: Path) -> None:
    """Writes `target`, line by line, without what is private."""
    temporary = target.with_name(f".{target.name}.{own_word()}")
    try:
        with (
            open(source, "rb") as lines,
            stream(temporary) as file,
            gzip.GzipFile("", "wb", 6, file) as zipped,
        ):
            zipped.writelines(PRIVATE.sub(rb'\1""', line) for line in lines)
        rename(temporary, target)
    except BaseException:
        remove(temporary)
        raise


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
