"""Does the work around the steps of a run: metrics, console, validation, samples, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from torch import Tensor, nn

from fivefold.checkpoint import store
from fivefold.comm import told
from fivefold.comm.progress import progress
from fivefold.data.chat import ChatTemplate
from fivefold.data.tokenizer import Tokenizer
from fivefold.errors import UserError
from fivefold.host.machine import peak_memory_bytes
from fivefold.launch.ranks import Ranks
from fivefold.models.card import card_of
from fivefold.observe.console import Console
from fivefold.observe.faults import KINDS, USUAL, SlowRanks
from fivefold.observe.metrics import MetricsWriter, read_metrics
from fivefold.observe.summary import summarize
from fivefold.parallel.mesh import Microbatch
from fivefold.recipe import count_parameters, tokens_before
from fivefold.step.custom import measuring
from fivefold.step.state import State
from fivefold.step.validation import validate
from fivefold.train.checked import anywhere
from fivefold.train.faults import Fault, corrupted, note
from fivefold.train.generate import Chat, Sampling, generate_text, open_run
from fivefold.train.instruments import (
    HistogramWatch,
    Instrument,
    NoiseScale,
    ProfileWatch,
    RunForecast,
    Speed,
    TimelineWatch,
)
from fivefold.train.job import Job, identity
from fivefold.train.memory_watch import MemoryWatch
from fivefold.train.out_of_memory import out_of_memory
from fivefold.train.saver import Saver
from fivefold.train.share import stream_states, validation_sets
from fivefold.train.user_hooks import WITHOUT, Callbacks

VAL_LOSS, SAMPLE = "val_loss", "sample"  # keys of the lines of a validation and of a sample
GREETING = "Hello"  # what a model that has learned from conversations is told for a sample, if nothing else
MAX_SAMPLED = 1_000_000_000  # parameters of a divided model that rank 0 puts together for a sample (4 GB)


@dataclass
class RunHooks:
    """What `train_loop` calls around its steps on one rank.

    Only rank 0 writes files and the console. `metrics` is None on the others. next_batch: this rank's microbatches, and
    the seconds waited for them; set where training begins. stop_wanted: was this rank asked to stop?"""

    state: State
    job: Job
    ranks: Ranks
    console: Console
    metrics: MetricsWriter | None
    stop_wanted: Callable[[], bool]
    predicted: RunForecast

    def __post_init__(self) -> None:
        self.next_batch: Callable[[], tuple[list[Microbatch], float]]
        recipe = self.job.recipe
        self.inspected = -1  # from when a step's gradient is whole until its update is done: this step
        self.right = self.state.step  # the last one in which ranks were found to be alike
        self.memory = MemoryWatch(self.job, self.ranks, self.state.step)
        wanted, self.stop_wanted = self.stop_wanted, lambda: bool(self.callbacks.stopped) or wanted()
        self.saver = Saver(self.state, self.job, self.alarm, self.flush, wanted, self.ranks.local_world)
        self.instruments: list[Instrument] = [
            self.saver,
            Speed(self.job, self.ranks, self.state),
            self.predicted,
            self.memory,
            TimelineWatch(self.job, self.ranks, self.predicted.timeline),
            HistogramWatch(self.job, self.ranks),
            ProfileWatch(self.job, self.ranks),
        ]
        if recipe.observe.noise_scale:
            self.instruments.append(NoiseScale(self.state, recipe))
        self.validated = False
        self.slow = SlowRanks(self.state.mesh.layout)
        own = self.job.own if self.ranks.first else WITHOUT
        self.callbacks = Callbacks(own, self.job.out, recipe.train.steps or 0)
        self.unsaid: list[int] = []  # steps that are being saved, of which callbacks do not know yet

    def save_due(self, step: int) -> bool:
        """True if the state is saved after this step; the same on all ranks."""
        again = self.saver.retry_at is not None and step >= self.saver.retry_at
        return again or due(self.job.recipe.checkpoint.every, step)

    def save_wanted(self) -> bool:
        """True on the first rank if a checkpoint is due by time."""
        return self.ranks.first and self.saver.is_time()

    def begin_step(self, microbatches: list[Microbatch]) -> None:
        """This rank's microbatches are there; the step is about to run. Raises UserError: the run's folder is gone."""
        self.require_folder()
        for instrument in self.instruments:
            instrument.begin_step(self.state, microbatches)

    def inspect(self) -> dict[str, Tensor]:
        """Returns further figures of the step: see `step.take_step`."""
        self.inspected, figures = self.state.step, dict[str, Tensor]()
        for instrument in self.instruments:
            figures |= instrument.begin_update(self.state)
        return figures

    def end_step(self) -> dict[str, Any]:
        """The step is queued. Returns the figures that the host knows already."""
        for instrument in self.instruments:
            for text in instrument.end_step(self.state).splitlines():
                self.console.note(text)
        return {"peak_memory_bytes": peak_memory_bytes(str(self.ranks.device))}

    def compare(self, step: int) -> Fault | None:
        """Compares ranks that must have the same bits, in steps in which this is due."""
        faults = self.job.recipe.faults
        if self.state.mesh.size("run") == 1 or not due(faults.hash_every, step):
            return None
        if wrong := corrupted(self.state):
            return Fault(step, wrong, faults.on_corruption, self.right, leaves_out=False, good=False)
        self.right = step
        return None

    def record(self, line: dict[str, Any]) -> None:
        """Records the figures of a step, in order of steps."""
        fault = note(self.job.recipe, line)
        for name in (*KINDS, *USUAL):
            if not fault or not line.get(name):
                line.pop(name, None)
        for instrument in self.instruments:
            line |= instrument.figures(line)
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
        if fault:
            self.console.warn(fault)

    def written(self, step: int) -> set[str]:
        """The keys that the metrics have of a step. All ranks call it, and get the same."""
        keys = set[str]()
        if self.metrics is not None:
            with suppress(UserError):  # no file: its disk is full
                keys = {key for line in read_metrics(self.job.out) if line["step"] == step for key in line}
        return set(json.loads(told(json.dumps(list(keys)), 0, self.state.mesh.axis("run"))))

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
        if self.state.mesh.divided:
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
        self._write({"step": step, SAMPLE: text})
        self.console.sample(text, step)

    def _common_weights(self) -> AbstractContextManager[None]:
        """The replica groups' common weights, if there are several replica groups; otherwise there is nothing to
        change."""
        return self.state.outer.common() if self.state.outer else nullcontext()

    def save(self, step: int, ends: bool, waits: bool = True) -> None:
        """Saves the state. ends: no step follows, so it is saved when this returns, or this raises UserError. waits: it
        is tried until it works."""
        self.require_folder()
        with progress.phase("saving"):
            known = stream_states(self.job, step, self.state.left_out) if self.ranks.first else {}
            tokens = {"tokens": tokens_before(self.job.recipe, step)}
            self.saver.save(identity(self.job) | tokens | known, ends, waits)
        if self.callbacks:
            self.unsaid.append(step)

    def close(self) -> None:
        """The run ends, perhaps by an error."""
        for instrument in self.instruments:
            instrument.close()

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
        whole = self.callbacks and not self.state.mesh.divided
        return self.state.module if whole else None

    def alarm(self, step: int, text: str) -> None:
        """Says on the console and in the report what must not be missed."""
        self.console.alarm(f"step {step}: {text}")
        self._write({"step": step, "alarm": text})

    def require_folder(self) -> None:
        """Raises UserError: the run's folder was removed or renamed. Nothing makes it anew."""
        if self.metrics is not None:
            self.metrics.require()

    def flush(self) -> None:
        """Forces the metrics to the disk: a checkpoint that survives a power cut needs those before it."""
        if self.metrics is not None:
            self.metrics.flush()

    def _write(self, line: dict[str, Any]) -> None:
        if self.metrics is not None and (problem := self.metrics.write(line)):
            self.console.warn(f"WARNING: {problem}")


def sampled(state: State, job: Job, step: int, tokenizer: Tokenizer) -> str:
    """A sample of the model as it is now; where ranks divide it, of this step's checkpoint. Raises UserError: the model
    has diverged, is divided and not saved or too large for a rank, or there is no memory."""
    train, folder = job.recipe.train, store.folder_of(job.out, step)
    sampling = Sampling(max_tokens=train.sample_tokens, seed=train.seed)
    if state.mesh.divided and folder not in store.checkpoints(job.out):
        raise UserError("the model is divided between ranks, so only saved steps can write samples")
    if state.mesh.divided and count_parameters(job.recipe.model) > MAX_SAMPLED:
        raise UserError("the model is divided between ranks and too large for one; use `fivefold generate`")
    try:
        whole = not state.mesh.divided
        module = state.module if whole else open_run(job.out, checkpoint=folder, device=state.mesh.device)[0]
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


def due(every: int, step: int) -> bool:
    """True if something that happens every `every` steps happens after this one. 0: never."""
    return every > 0 and step % every == 0
