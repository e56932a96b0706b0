"""What looks into the steps of a rank, each an `Instrument`: its speed, the noise of its gradients, PyTorch's profiler
(`observe.profile_steps`), memory over a step (`observe.memory_step`), computing and messages of one (`trace_step`), its
numbers by their exponent (`histogram_step`). They write into RUN/traces, and change nothing of what is trained."""

from __future__ import annotations

import gzip
import io
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile

from fivefold.comm.progress import progress, span
from fivefold.data.dataset import amounts, order_of, seen
from fivefold.errors import UserError
from fivefold.files import NO_ROOM, make_folder, own_word, remove, write_atomically
from fivefold.launch.ranks import Ranks
from fivefold.models.card import card_of, flops_per_token
from fivefold.observe import number_formats, timelines
from fivefold.observe.timelines import LONGEST, Operator, trace_name, write_operators, write_pipeline_trace
from fivefold.optim.noise import noise_parts
from fivefold.parallel.mesh import Mesh, Microbatch, Share
from fivefold.recipe import Recipe, microbatches_per_step, tokens_before, tokens_per_step
from fivefold.recipe.entries import steps
from fivefold.schedules.timelines import StepTimeline
from fivefold.sharding.parts import size_of
from fivefold.sharding.units import scattered_once
from fivefold.step.recorder import Counter, Recorder
from fivefold.step.state import State, compute_mode
from fivefold.train.job import Job
from fivefold.train.peak import busy_share, device_peak, listed_peak
from fivefold.train.share import documents_of


class Instrument:
    """All ranks call the same methods, in the same steps."""

    def begin_step(self, state: State, microbatches: Sequence[Microbatch]) -> None:
        """This rank's microbatches are there; step `state.step` + 1 is about to run."""

    def begin_update(self, state: State) -> Mapping[str, Tensor]:
        """The whole gradient is there. Returns further figures of the step, as `step.take_step` wants them."""
        return {}

    def end_step(self, state: State) -> str:
        """Step `state.step` is queued. Returns lines for the console, which the first rank writes."""
        return ""

    def figures(self, line: dict[str, Any]) -> Mapping[str, Any]:
        """More figures of a step, given those in its line. Takes those of `begin_update` out of it."""
        return {}

    def close(self) -> None:
        """The run ends, perhaps by an error in a step."""


class RunForecast(Instrument):
    """The prediction of one run, on each of its ranks. This one predicts nothing, because of `why`."""

    peak_bytes: int | None = None
    """Of a rank's tensors, as predicted."""

    def __init__(self, why: str = "") -> None:
        self.why = why

    def write(self) -> str:
        """Writes the prediction into the run's folder. Returns a line about it."""
        return f"no prediction: {self.why}"

    def learn(self, step: int, seconds: float) -> str:
        """Takes a step's seconds; returns a line if it predicts anew by them."""
        return ""

    def timeline(self, step: int) -> StepTimeline | None:
        """The planned timeline of a step."""
        return None

    def conclude(self, mesh: Mesh, memory_bytes: int | None = None) -> None:
        """Adds what was measured; all ranks call it. memory_bytes: most bytes of tensors at once in a step."""


class Speed(Instrument):
    """Figures of a step that follow from its seconds."""

    def __init__(self, job: Job, ranks: Ranks, state: State):
        self.recipe, self.state, self.peak = job.recipe, state, 0.0
        documents, causal = documents_of(job), card_of(job.recipe.model).causal
        pairs = partial(documents.pairs, causal) if documents else None
        self.flops = flops_per_token(job.recipe.model, pairs) if job.module is None else None
        mode = compute_mode(job.recipe, ranks.device)
        if self.flops and ranks.device.type == "cpu":  # ranks on one machine's CPU share its cores
            self.peak = device_peak("cpu", mode.measured) * ranks.world / ranks.local_world
        elif self.flops:
            listed = listed_peak(torch.cuda.get_device_name(ranks.device), mode.rate)
            self.peak = (listed or device_peak(str(ranks.device), mode.measured)) * ranks.world
        self.busy = busy_share(ranks.device.type, mode.measured)
        mixed = job.data is not None and job.data.mixed
        self.amounts = amounts(job.recipe, job.data) if job.data is not None and mixed else {}
        self.order = order_of(job.recipe, self.amounts) if self.amounts else None

    def figures(self, line: dict[str, Any]) -> Mapping[str, Any]:
        step, tokens = line["step"], tokens_before(self.recipe, line["step"])
        speed = (tokens - tokens_before(self.recipe, step - 1)) / line["step_s"]
        figures: dict[str, Any] = {"tokens": tokens, "tokens_per_s": speed}
        if self.flops and self.peak:
            figures["mfu"] = speed * self.flops / self.peak
            figures |= {"peak_share": self.busy} if self.busy else {}
        if self.amounts:
            sources = seen(self.recipe, self.amounts, step, self.state.left_out, self.order)
            figures["source_tokens"] = {name: source.tokens for name, source in sources.items()}
        return figures


MEMORY = 0.98
"""Weight of earlier steps in the averages. A single step's estimate is far too noisy (the paper averages, too)."""
ONE_PART = 0.999
"""Sum of squared shares from which on a step has only one part that counts."""
SQUARES, UNEVEN = "partial_squares", "partial_weights"
"""Figures of a step: see `NoiseScale.begin_update`."""


class NoiseScale(Instrument):
    """Measures the gradient noise scale in training (arXiv 1812.06162, appendix A.1): the batch size at which the
    gradient's noise equals its signal. A larger batch costs more tokens than it saves steps.

    The squared norm of a gradient over b sequences is |G|^2 + tr(Sigma) / b on average. Two batch sizes give both
    unknowns: the whole batch, whose norm clipping needs anyway, and the gradients that add up to it. These are measured
    before they are summed: per microbatch, or per rank if ZeRO scatters once per step.

    Parts may count unequally (packed documents, answers). Part k has the share w_k of the batch's B targets, and its
    gradient is w_k times a mean over w_k B targets. So the squared norms of all parts sum to q |G|^2 + tr(Sigma) / B on
    average, where q is the sum of w_k^2: as if a part had q B targets. Equal parts have q = 1 / their number.

    The estimates of |G|^2 and of tr(Sigma) over the batch are unbiased. They are averaged over steps in `state.noise`
    before they are divided. A resumed run continues with its averages. Raises UserError: a step has only one microbatch
    on one rank, so there is nothing to compare."""

    def __init__(self, state: State, recipe: Recipe, memory: float = MEMORY):
        layout, train = recipe.layout, recipe.train
        self.state, self.mesh, self.tokens, self.memory = state, state.mesh, tokens_per_step(recipe), memory
        shared = layout.zero > 0 and state.mesh.size("shard") > 1
        once = shared and scattered_once(layout.zero, layout.pp)
        parts = state.mesh.size("dp") * (1 if once else microbatches_per_step(recipe))
        if parts < 2:
            raise UserError(
                "observe.noise_scale compares gradients within a step, but a step of this run has only one. Nearest "
                f"valid: train.microbatch_size = {max(1, train.global_batch_size // 2)}, or two data-parallel ranks"
            )
        self.once = once
        self.square, self.uneven = torch.zeros(2, dtype=torch.float64, device=state.mesh.device)
        for replica in state.parallel.replicas:
            # One tensor-parallel rank counts the parameters that all of them share
            first, parts_of = state.mesh.index("tp") == 0, replica.parts.items()
            counted = {n for n, p in parts_of if first or size_of(p.computes) < math.prod(p.shape)}
            replica.watch(self._see, counted)

    def begin_step(self, state: State, microbatches: Sequence[Microbatch]) -> None:
        share, mesh = Share.of(microbatches, self.mesh), self.mesh
        weights = [microbatch.weight / share.total for microbatch in share[: share.counted]]
        parts = [math.fsum(weights)] if self.once else weights
        # Ranks of tp and pp compute with the same microbatches: the first one counts.
        counts = mesh.index("tp") == 0 and mesh.index("pp") == 0
        self.uneven.fill_(math.fsum(part * part for part in parts) if counts else 0.0)

    def _see(self, gradient: Tensor) -> None:
        """Adds the squared norm of a partial gradient. Losses are scaled so that the partial gradients sum to the
        mean."""
        self.square += torch.linalg.vector_norm(gradient, dtype=torch.float32).double().square()

    def begin_update(self, state: State) -> Mapping[str, Tensor]:
        """The sum of the squared norms of this step's partial gradients, and that of the squares of their shares of the
        batch."""
        square, self.square = self.square, torch.zeros_like(self.square)
        if self.state.loss_scale is not None:
            square = square / self.state.loss_scale.values[0] ** 2
        sums = self.mesh.axis("all").all_reduce(torch.stack([square, self.uneven]))
        return dict(zip((SQUARES, UNEVEN), sums.unbind(), strict=True))

    def figures(self, line: dict[str, Any]) -> Mapping[str, Any]:
        """noise_scale: in tokens; left out while noise hides the gradient. A step with all its targets in one part says
        nothing."""
        norm, square, uneven = line["grad_norm"], line.pop(SQUARES), line.pop(UNEVEN)
        if not math.isfinite(square + norm) or not 0 < uneven < ONE_PART:
            return {}
        now = noise_parts(uneven, 1.0, square / uneven, norm * norm)
        gradient, trace = (
            before + (1 - self.memory) * (seen - before)
            for before, seen in zip(self.state.noise, now, strict=True)
        )
        self.state.noise = gradient, trace
        return {"noise_scale": self.tokens * trace / gradient} if gradient > 0 else {}


QUIET = "KINETO_LOG_LEVEL", "6"
"""Kineto's logger notes each profile on stderr. On GPUs it may say why kernels are missing."""
PRIVATE = re.compile(rb'("(?:host_name|traceName)": )"(?:[^"\\]|\\.)*"')
"""What a trace says of the machine. No host names and paths are written into run folders (SECURITY.md)."""


class ProfileWatch(Instrument):
    """Records steps with PyTorch's profiler."""

    def __init__(self, job: Job, ranks: Ranks):
        self.folder, self.ranks = job.out / "traces", ranks
        wanted, most = steps(job.recipe.observe.profile_steps), job.recipe.train.steps or 0
        self.steps = wanted[: most - wanted.start + 1] if wanted.start <= most else range(0)
        self.running: profile | None = None
        self.first = 0  # of the steps that are recorded
        self._step = ExitStack()

    def begin_step(self, state: State, microbatches: Sequence[Microbatch]) -> None:
        if (step := state.step + 1) not in self.steps:
            return self.close()  # the run has gone back to a step before them
        if self.running is None:
            activities, cuda = [ProfilerActivity.CPU], self.ranks.device.type == "cuda"
            if cuda:
                activities.append(ProfilerActivity.CUDA)
                torch.cuda.synchronize(self.ranks.device)  # kernels of earlier steps do not count
            else:
                os.environ.setdefault(*QUIET)
            self.running, self.first = profile(activities=activities, record_shapes=True), step
            self.running.start()
            progress.profiling = True
        self._step.enter_context(span("step", step))

    def end_step(self, state: State) -> str:
        recorded = self.running
        if recorded is None or state.step < self.steps[-1]:
            self._step.close()
            return ""
        with progress.phase("writing the profile"):
            self.close()
            try:
                return self._write(recorded, state.step)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                return f"WARNING: the profile is not written: {error.strerror}"

    def close(self) -> None:
        """Ends a recording that has not come to its last step. It is not written."""
        self._step.close()
        if self.running is not None:
            recorded, self.running, progress.profiling = self.running, None, False
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
    operators: list[Operator] = []
    for average in averages:
        if average.device_type == where and not average.is_user_annotation:
            us = average.self_device_time_total if cuda else average.self_cpu_time_total
            operators.append(Operator(str(average.key), average.count, us / 1e6))
    whole = sum(operator.seconds for operator in operators)
    longest = sorted(operators, key=lambda operator: -operator.seconds)[:LONGEST]
    return [operator._replace(share=operator.seconds / whole) for operator in longest if operator.seconds > 0]


def _compress(source: Path, target: Path) -> None:
    """Writes `target` without what is private."""
    content = io.BytesIO()
    with open(source, "rb") as lines, gzip.GzipFile("", "wb", 6, content) as zipped:
        zipped.writelines(PRIVATE.sub(rb'\1""', line) for line in lines)
    write_atomically(target, content.getvalue())


class TimelineWatch(Instrument):
    """Measures when this rank computes and sends in `observe.trace_step`, on CPUs, and a pipeline its actions.
    planned: the planner's timeline of a step, if it has one."""

    def __init__(self, job: Job, ranks: Ranks, planned: Callable[[int], StepTimeline | None]):
        self.job, self.ranks, self.planned = job, ranks, planned
        self.recorder: Recorder | None = None

    def begin_step(self, state: State, microbatches: Sequence[Microbatch]) -> None:
        traced = state.step + 1 == self.job.recipe.observe.trace_step
        if state.parallel.pipeline is not None:
            state.parallel.pipeline.recording = traced
        self.recorder = Recorder(state) if traced and self.ranks.device.type == "cpu" else None

    def begin_update(self, state: State) -> Mapping[str, Tensor]:
        if self.recorder is not None:
            self.recorder.mark("update", "update")
        return {}

    def end_step(self, state: State) -> str:
        lines, pipeline, out = list[str](), state.parallel.pipeline, self.job.out
        if self.ranks.device.type != "cpu" and state.step == self.job.recipe.observe.trace_step:
            lines.append("observe.trace_step is for CPUs; observe.profile_steps records the kernels of GPUs")
        if self.recorder is not None:
            timeline, self.recorder = self.recorder.stop(state.step), None
            path = timelines.write(out, timeline)
            if self.ranks.first and (planned := self.planned(state.step)):
                timelines.write(out, planned, planned=True)
            measured = f"computing and messages of step {state.step}: {timelines.summary(timeline)}"
            lines.append(f"{measured}. {path}; `fivefold draw {out}` draws them")
        if self.ranks.first and pipeline is not None and pipeline.recording and pipeline.recorded is not None:
            path = write_pipeline_trace(out / "traces", state.step, *pipeline.recorded)
            lines.append(f"timeline of the pipeline in step {state.step}: {path}")
        return "\n".join(lines)


class HistogramWatch(Instrument):
    """Counts the numbers of `observe.histogram_step` by their exponent."""

    def __init__(self, job: Job, ranks: Ranks):
        self.job, self.ranks, self.written = job, ranks, ""
        self.counter: Counter | None = None

    def begin_step(self, state: State, microbatches: Sequence[Microbatch]) -> None:
        if state.step + 1 == self.job.recipe.observe.histogram_step:
            self.counter = Counter(state)

    def begin_update(self, state: State) -> Mapping[str, Tensor]:
        if self.counter is not None:
            histogram, self.counter = self.counter.take(), None
            if self.ranks.first:
                path = number_formats.write(self.job.out, state.step + 1, histogram)
                shown = f"`fivefold formats --run {self.job.out}` shows them"
                self.written = f"numbers by exponent: {path}; {shown}"
        return {}

    def end_step(self, state: State) -> str:
        line, self.written = self.written, ""
        return line
