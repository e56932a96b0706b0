"""Does the work around the steps of a run: metrics, console, validation, samples, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.bench.peak import busy_share, device_peak, listed_peak
from fivefold.checkpoint import store
from fivefold.comm.progress import progress
from fivefold.data import mixture
from fivefold.data.chat import ChatTemplate
from fivefold.data.mixture import amounts, order_of
from fivefold.data.tokenizer import Tokenizer
from fivefold.errors import UserError
from fivefold.host import memory
from fivefold.host.machine import peak_memory_bytes
from fivefold.launch.ranks import Ranks
from fivefold.models.card import card_of, flops_per_token
from fivefold.observe import number_formats, timelines
from fivefold.observe.console import Console
from fivefold.observe.faults import KINDS, USUAL, SlowRanks
from fivefold.observe.metrics import MetricsWriter, read_metrics
from fivefold.observe.summary import summarize
from fivefold.observe.timelines import summary, write_pipeline_trace
from fivefold.parallel.microbatch import Microbatch
from fivefold.recipe import LeftOut, Recipe, count_parameters, tokens_before
from fivefold.schedules.timelines import StepTimeline
from fivefold.step.custom import measuring
from fivefold.step.recorder import Counter, Recorder
from fivefold.step.state import State, compute_mode
from fivefold.step.step import validate
from fivefold.train.checked import anywhere
from fivefold.train.faults import Fault, corrupted, note
from fivefold.train.generate import Chat, Sampling, generate_text, open_run
from fivefold.train.job import Job, identity
from fivefold.train.loop import due
from fivefold.train.noise import NoiseScale
from fivefold.train.prediction import Prediction
from fivefold.train.profile import MemoryWatch, ProfileWatch
from fivefold.train.saver import BUSY, FAILED, Saver
from fivefold.train.share import documents_of, stream_states, validation_sets
from fivefold.train.user_hooks import WITHOUT, Callbacks

GREETING = "Hello"  # what a model that has learned from conversations is told for a sample, if nothing else
SQUARES, UNEVEN = "partial_squares", "partial_weights"  # the figures of a step that `NoiseScale.take` returns
MAX_SAMPLED = 1_000_000_000  # parameters of a divided model that rank 0 puts together for a sample (4 GB)


class Speed:
    """Figures of a step that follow from its seconds."""

    def __init__(self, job: Job, ranks: Ranks):
        self.recipe = job.recipe
        documents, causal = documents_of(job), card_of(job.recipe.model).causal
        pairs = documents.pairs(causal) if documents else 1.0
        self.flops = flops_per_token(job.recipe.model, pairs) if job.module is None else None
        self.peak = _peak_flops(job.recipe, ranks) if self.flops else None
        self.busy = busy_share(ranks.device.type, compute_mode(job.recipe, ranks.device).measured)
        self.amounts = amounts(job.recipe, job.data) if job.data is not None and job.data.mixed else {}
        self.order = order_of(job.recipe, self.amounts) if self.amounts else None

    def figures(self, step: int, seconds: float, left_out: LeftOut = ()) -> dict[str, Any]:
        seen = tokens_before(self.recipe, step)
        own = seen - tokens_before(self.recipe, step - 1)
        found: dict[str, Any] = {"tokens": seen, "tokens_per_s": own / seconds}
        if self.flops and self.peak:
            found["mfu"] = found["tokens_per_s"] * self.flops / self.peak
            found |= {"peak_share": self.busy} if self.busy else {}
        if self.amounts:
            sources = mixture.seen(self.recipe, self.amounts, step, left_out, self.order)
            found["source_tokens"] = {name: one.tokens for name, one in sources.items()}
        return found


@dataclass
class RunHooks:
    """The hooks of `train_loop` on one rank (see `loop.Hooks`).

    Only rank 0 writes files and the console. `metrics` is None on the others."""

    state: State
    job: Job
    ranks: Ranks
    console: Console
    metrics: MetricsWriter | None
    stop_wanted: Callable[[], bool]
    predicted: Prediction

    def __post_init__(self) -> None:
        self.next_batch: Callable[[], tuple[list[Microbatch], float]]  # set where training begins
        recipe = self.job.recipe
        self.speed = Speed(self.job, self.ranks)
        self.noise = NoiseScale(self.state, recipe) if recipe.observe.noise_scale else None
        self.recorder: Recorder | None = None
        self.counter: Counter | None = None
        self.inspected = -1
        self.right = self.state.step  # the last one in which ranks were found to be alike
        self.memory = MemoryWatch(self.job, self.ranks, self.state.step)
        self.profile = ProfileWatch(self.job, self.ranks)
        self.validated = False
        self.slow = SlowRanks(self.state.mesh.layout)
        own = self.job.own if self.ranks.first else WITHOUT
        self.callbacks = Callbacks(own, self.job.out, recipe.train.steps or 0)
        self.unsaid: list[int] = []  # steps that are being saved, of which callbacks do not know yet
        wanted = self.stop_wanted
        self.stop_wanted = lambda: bool(self.callbacks.stopped) or wanted()
        self.saver = Saver(self.state, self.job, self.alarm, self.flush, wanted, self.ranks.local_world)

    def save_due(self, step: int) -> bool:
        return due(self.job.recipe.checkpoint.every, step) or self.saver.tries_again(step)

    def save_wanted(self) -> bool:
        return self.ranks.first and self.saver.is_time()

    def begin_step(self, microbatches: list[Microbatch]) -> None:
        self.saver.poll()
        if self.noise:
            self.noise.begin(microbatches)
        self.predicted.begin_step(self.state)
        self.memory.begin_step(self.state)
        traced = self.state.step + 1 == self.job.recipe.observe.trace_step
        if traced and self.state.mesh.device.type == "cpu":
            self.recorder = Recorder(self.state)
        if self.state.step + 1 == self.job.recipe.observe.histogram_step:
            self.counter = Counter(self.state)
        self.profile.begin_step(self.state.step + 1)

    @property
    def updating(self) -> bool:
        """True from when a step's gradient is whole until its update is done: then no consistent state can be saved."""
        return self.inspected == self.state.step

    def inspect(self) -> dict[str, Tensor]:
        self.inspected = self.state.step
        self.saver.before_update()
        if self.counter is not None:
            found, self.counter = self.counter.take(), None
            if self.ranks.first:
                path = number_formats.write(self.job.out, self.state.step + 1, found)
                shows = f"`fivefold formats --run {self.job.out}` shows them"
                self.console.note(f"numbers by exponent: {path}; {shows}")
        self.memory.begin_update()
        if self.recorder is not None:
            self.recorder.mark("update", "update")
        noise = zip((SQUARES, UNEVEN), self.noise.take(), strict=True) if self.noise else ()
        return self.saver.figures() | dict(noise)

    def end_step(self) -> dict[str, Any]:
        self.predicted.end_step()
        if (said := self.profile.end_step(self.state.step)) and self.ranks.first:
            self.console.note(said)
        if (path := self.memory.end_step(self.state.step)) and self.ranks.first:
            self.console.note(f"memory over step {self.state.step}: {path}")
        if self.recorder is not None:
            self._write_timeline(self.recorder.stop(self.state.step))
            self.recorder = None
        return {"peak_memory_bytes": peak_memory_bytes(str(self.ranks.device))}

    def compare(self, step: int) -> Fault | None:
        faults = self.job.recipe.faults
        if self.state.mesh.size("run") == 1 or not due(faults.hash_every, step):
            return None
        if wrong := corrupted(self.state):
            return Fault(step, wrong, faults.on_corruption, self.right, leaves_out=False, good=False)
        self.right = step
        return None

    def record(self, line: dict[str, Any]) -> None:
        self.saver.answer(line.pop(FAILED, None), line.pop(BUSY, None))
        said = note(self.job.recipe.faults, line)
        for name in (*KINDS, *USUAL):
            if not said or not line.get(name):
                line.pop(name, None)
        line |= self.speed.figures(line["step"], line["step_s"], self.state.left_out)
        if self.noise:
            line |= self.noise.figures(line["grad_norm"], line.pop(SQUARES), line.pop(UNEVEN))
        if slow := self.slow.add(line.pop("rank_seconds", [])):
            line["slow_rank"] = slow.figures
        line |= self.callbacks.tell("on_step", line["step"], figures=line, model=self._model)
        self._write(line)
        self.console.step(line)
        if learned := self.predicted.learn(line["step"], line["step_s"]):
            self.console.note(learned)
        self._tell_of_saves()
        if slow:
            self.console.warn(f"step {line['step']}: {slow}")
        pipeline = self.state.parallel.pipeline
        traced = line["step"] == self.job.recipe.observe.trace_step
        if self.ranks.first and traced and pipeline is not None and pipeline.recorded is not None:
            path = write_pipeline_trace(self.job.out / "traces", line["step"], *pipeline.recorded)
            self.console.note(f"timeline of the pipeline in step {line['step']}: {path}")
        if said:
            self.console.warn(said)

    def _write_timeline(self, timeline: StepTimeline) -> None:
        path = timelines.write(self.job.out, timeline)
        if self.ranks.first:
            if planned := self.predicted.timeline(timeline.step):
                timelines.write(self.job.out, planned, planned=True)
            said = f"computing and messages of step {timeline.step}: {summary(timeline)}"
            self.console.note(f"{said}. {path}; `fivefold draw {self.job.out}` draws them")

    def validate(self, step: int) -> None:
        job = self.job
        with nullcontext() if self.validated else progress.phase("the first validation"):  # it may compile
            # Perhaps no microbatches for this rank: it still takes part.
            sets = validation_sets(job, self.state.mesh)
            if not sets:
                return  # nothing is held out, on any rank
            metrics = {name: one.get() for name, one in job.own.metrics.items()}
            measured = measuring(self.state.parallel.stages, metrics, self.state.mesh)
            with self._common_weights(), measured as means:
                line = {"step": step, **validate(self.state, sets)}
            if metrics:
                line |= {f"val_{name}": value for name, value in means().items()}
        self.validated = True
        if errors := self.state.compression_errors():
            line |= {"compression_error": fmean(errors.values()), "compression_errors": errors}
        line |= self.callbacks.tell("on_validation", step, figures=line, model=self._model)
        self._write(line)
        self.console.validation(line)

    def sample(self, step: int) -> None:
        job = self.job
        tokenizer = job.data.tokenizer if job.data is not None else None
        if self.state.mesh.layout.divided:
            self.settle()  # the sample is written by the checkpoint of this step
        own = job.module is not None
        if not self.ranks.first or tokenizer is None or own or not card_of(job.recipe.model).causal:
            return
        try:
            with progress.phase("sampling"), self._common_weights():
                text = sampled(self.state, self.job, step, tokenizer)
        except UserError as error:  # a diverged model cannot write; the run continues
            self.console.note(f"step {step}: no sample: {error}")
            return
        self._write({"step": step, "sample": text})
        self.console.sample(text, step)

    def _common_weights(self) -> AbstractContextManager[None]:
        """The sites' common weights, if there are several sites; otherwise there is nothing to change."""
        return self.state.outer.common() if self.state.outer else nullcontext()

    def save(self, step: int, ends: bool, waits: bool = True) -> None:
        with progress.phase("saving"):
            known = stream_states(self.job, step, self.state.left_out) if self.ranks.first else {}
            tokens = {"tokens": tokens_before(self.job.recipe, step)}
            self.saver.save(identity(self.job) | tokens | known, ends, waits)
        if self.callbacks:
            self.unsaid.append(step)

    def settle(self) -> None:
        """Waits for the save under way, on all ranks."""
        with progress.phase("saving"):
            self.saver.settle()

    def end(self, complete: bool) -> bool:
        """Tells callbacks that the run has ended. Returns True if one of them wanted that. All ranks call it."""
        if not self.job.own.callbacks:
            return False
        self._tell_of_saves()
        if self.ranks.first:
            figures = summarize(read_metrics(self.job.out)) | {"complete": complete}
            self.callbacks.tell("on_end", self.state.step, figures=figures, model=self._model)
        return anywhere(bool(self.callbacks.stopped), self.state.mesh.axis("run"))

    def _tell_of_saves(self) -> None:
        """Tells callbacks of checkpoints that are complete by now."""
        for step in [step for step in self.unsaid if store.folder_of(self.job.out, step).is_dir()]:
            folder = store.folder_of(self.job.out, step)
            self.callbacks.tell("on_save", step, checkpoint=folder, model=self._model)
            self.unsaid = [later for later in self.unsaid if later > step]

    @property
    def _model(self) -> nn.Module | None:
        """The model for callbacks, if this rank has the whole of it."""
        whole = self.callbacks and not self.state.mesh.layout.divided
        return self.state.module if whole else None

    def alarm(self, step: int, text: str) -> None:
        """Says on the console and in the report what must not be missed."""
        self.console.alarm(f"step {step}: {text}")
        self._write({"step": step, "alarm": text})

    def flush(self) -> None:
        """Forces the metrics to the disk: a checkpoint that survives a power cut needs those before it."""
        if self.metrics is not None:
            self.metrics.flush()

    def _write(self, line: dict[str, Any]) -> None:
        if self.metrics is not None and (problem := self.metrics.write(line)):
            self.console.warn(f"WARNING: {problem}")


def sampled(state: State, job: Job, step: int, tokenizer: Tokenizer) -> str:
    """A sample of the model as it is now.

    Raises:
        UserError: the model has diverged, is divided and not saved, or there is no memory for it.
    """
    train = job.recipe.train
    sampling = Sampling(max_tokens=train.sample_tokens, seed=train.seed)
    try:
        module = _whole_model(state, job, step)
        if tokenizer.chat_template:
            template = ChatTemplate(tokenizer.chat_template, tokenizer)
            chat = Chat(module, job.recipe.model, tokenizer, template, sampling)
            said = train.sample_prompt or GREETING
            return f"{said}\n{''.join(chat.ask(said))}"
        pieces = generate_text(module, job.recipe.model, tokenizer, train.sample_prompt, sampling)
        return train.sample_prompt + "".join(pieces)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        where = "CPU" if state.mesh.device.type == "cpu" else "GPU"
        raise UserError(f"not enough {where} memory for it during training") from None


NO_MEMORY = ("not enough memory", "can't allocate memory", "Cannot allocate memory", "std::bad_alloc")
NO_SPACE = ("can't start new thread", "could not create a primitive")  # stacks and code take address space


def out_of_memory(error: BaseException) -> bool:
    """True for an out-of-memory error. torch has a class for it on GPUs; its CPU allocator only says so."""
    if any(words in str(error) for words in NO_SPACE):
        return memory.address_space() is not None
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or any(words in str(error) for words in NO_MEMORY)


def _peak_flops(recipe: Recipe, ranks: Ranks) -> float:
    """Peak FLOP/s of all devices of the run. Ranks on one machine's CPU share its cores."""
    mode = compute_mode(recipe, ranks.device)
    if ranks.device.type == "cpu":
        return device_peak("cpu", mode.measured) * ranks.world / ranks.local_world
    listed = listed_peak(torch.cuda.get_device_name(ranks.device), mode.rate)
    return (listed or device_peak(str(ranks.device), mode.measured)) * ranks.world


def _whole_model(state: State, job: Job, step: int) -> nn.Module:
    """The whole model on one rank: its own, or if ranks divide it, that of this step's checkpoint.

    Raises:
        UserError: the model is divided, and this step is not saved or the model too large for one rank.
    """
    layout = state.mesh.layout
    if not layout.divided:
        return state.module
    if store.folder_of(job.out, step) not in store.checkpoints(job.out):
        raise UserError("the model is divided between ranks, so only saved steps can write samples")
    if count_parameters(job.recipe.model) > MAX_SAMPLED:
        raise UserError("the model is divided between ranks and too large for one; use `fivefold generate`")
    return open_run(job.out, checkpoint=store.folder_of(job.out, step), device=state.mesh.device)[0]
