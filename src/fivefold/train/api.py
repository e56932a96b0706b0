"""The Python interface. Its functions do the same as the commands."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

from torch import Tensor, nn

from fivefold.checkpoint import store
from fivefold.checkpoint.source import export_run, weights_of
from fivefold.data.tokenizer import Tokenizer
from fivefold.errors import UserError, brief
from fivefold.launch.ranks import device_for
from fivefold.models.base import LanguageModel
from fivefold.models.card import card_of
from fivefold.models.custom import ModuleCard
from fivefold.observe.console import QUIET, VALIDATIONS, quietly, summary_rows
from fivefold.observe.format import short_number
from fivefold.observe.metrics import read_metrics
from fivefold.observe.report import write_report
from fivefold.observe.summary import summarize
from fivefold.recipe import Recipe, count_parameters, load
from fivefold.step.custom import Loss, Metric, Schedule
from fivefold.train.evaluate import Evaluation, evaluate
from fivefold.train.generate import Sampling, open_run, require_tokenizer, samples_of
from fivefold.train.job import BatchSource
from fivefold.train.start import run_command
from fivefold.train.user_hooks import CallbackLike, Optimizer, brings

Prompts = list[str] | tuple[str, ...]


class EvaluationFields(TypedDict, total=False):
    """The fields of `Evaluation` (train/evaluate.py)."""

    shots: int
    shots_from: Path | str | None
    seed: int
    limit: int
    context: int | None
    stride: int | None
    batch_tokens: int | None
    dtype: str | None
    text_key: str | None


class SamplingFields(TypedDict, total=False):
    """The fields of `Sampling` (train/generate.py)."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop: tuple[str, ...]


class Run:
    """A run folder: its recipe, metrics, model, report. step: of the checkpoint that it takes; None: the newest."""

    def __init__(self, path: Path | str, step: int | None = None):
        self.path, self.step = Path(path), step
        self.recipe: Recipe = load(str(self.path / "recipe.toml"))
        self._opened: tuple[Path, LanguageModel, Tokenizer | None] | None = None

    def at(self, step: int) -> Run:
        """The same run with the checkpoint of this step.

        Raises:
            UserError: it has no such checkpoint.
        """
        store.chosen(self.path, step)
        return Run(self.path, step)

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: training, validation and samples."""
        return read_metrics(self.path / "metrics.jsonl")

    def checkpoints(self) -> list[Path]:
        """Folders of the run's checkpoints, oldest first."""
        return store.checkpoints(self.path)

    @property
    def checkpoint(self) -> Path:
        """The folder of the checkpoint.

        Raises:
            UserError: the run has none.
        """
        return store.chosen(self.path, self.step)

    @property
    def model(self) -> LanguageModel:
        """The model with the checkpoint's weights, in evaluation mode: tokens (B, T) -> logits (B, T, V). It is read
        once.

        Raises:
            UserError: the run has no checkpoint, or its model is a module of your own: load `weights()` into it.
        """
        return self._open()[0]

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer: `encode(text)`, `decode(ids)`.

        Raises:
            UserError: the run has none.
        """
        return require_tokenizer(self.path, self._open()[1])

    def _open(self) -> tuple[LanguageModel, Tokenizer | None]:
        folder = self.checkpoint
        if self._opened is None or self._opened[0] != folder:
            module, _, tokenizer = open_run(self.path, checkpoint=folder, device=device_for(0))
            self._opened = folder, module, tokenizer
        return self._opened[1:]

    @overload
    def generate(self, prompts: str = "", *, samples: None = None, **how: Unpack[SamplingFields]) -> str: ...
    @overload
    def generate(
        self, prompts: Prompts, *, samples: None = None, **how: Unpack[SamplingFields]
    ) -> list[str]: ...
    @overload
    def generate(self, prompts: str, *, samples: int, **how: Unpack[SamplingFields]) -> list[str]: ...
    @overload
    def generate(
        self, prompts: Prompts, *, samples: int, **how: Unpack[SamplingFields]
    ) -> list[list[str]]: ...
    def generate(
        self, prompts: str | Prompts = "", *, samples: int | None = None, **how: Unpack[SamplingFields]
    ) -> str | list[str] | list[list[str]]:
        """Text that the model writes after a prompt, or after each of several.

        samples: how many for each prompt, as a list; None: one. how: fields of `Sampling`: max_tokens, temperature,
        top_k, top_p, seed, stop.

        Raises:
            UserError: the run has no checkpoint or no tokenizer, or a sampling value is not allowed.
        """
        if samples is not None and samples < 1:
            raise UserError(f"samples = {samples}: must be 1 or more")
        sampling, tokenizer, model = Sampling(**how), self.tokenizer, self.recipe.model
        several = [prompts] if isinstance(prompts, str) else prompts
        texts = [samples_of(self.model, model, tokenizer, each, sampling, samples or 1) for each in several]
        written = texts if samples is not None else [each[0] for each in texts]
        return written[0] if isinstance(prompts, str) else written

    def evaluate(
        self,
        *texts: Path | str,
        tasks: Sequence[Path | str] = (),
        step: int | None = None,
        **how: Unpack[EvaluationFields],
    ) -> dict[str, Any]:
        """Perplexity and bits per byte of text files, accuracy on task files (docs/evaluation.md).

        step: of the checkpoint; None: that of this run. how: fields of `Evaluation`, such as shots=5.

        Raises:
            UserError: a file, line or setting cannot be used, or the run has no such checkpoint.
        """
        return evaluate(self.path, texts, tasks, Evaluation(**how), step=self.step if step is None else step)

    def weights(self) -> dict[str, Tensor]:
        """The weights of the checkpoint, by name.

        Raises:
            UserError: the run has no checkpoint.
        """
        return weights_of(self.checkpoint)

    def export(
        self, folder: Path | str, weights: Mapping[str, Tensor] | None = None, *, dcp: bool = False
    ) -> Path:
        """Writes the checkpoint as a folder that Hugging Face `transformers` loads, or with `dcp` torchtitan.

        weights: by name, to be written instead, such as those of a module of your own, merged into the recipe's model.
        """
        return export_run(self.path, Path(folder), checkpoint=self.checkpoint, weights=weights, dcp=dcp)

    def report(self) -> Path:
        """Writes report.html again and returns its path."""
        return write_report(self.path)

    def _figures(self) -> dict[str, Any]:
        try:
            return summarize(self.metrics())
        except (OSError, UserError):
            return {}

    def __repr__(self) -> str:
        figures, model = self._figures(), self.recipe.model
        name, parameters = model.arch, count_parameters(model) if model.vocab_size else 0
        with suppress(OSError, UserError):  # without a checkpoint nobody knows
            saved = store.Reader(self.checkpoint).manifest.tensors["model"]
            weights = {name: math.prod(one.shape) for name, one in saved.items() if not one.buffer}
            if not weights.keys() <= card_of(model).parameters.keys():
                name, parameters = "a module of your own", sum(weights.values())
        said = [f"Run({str(self.path)!r}{'' if self.step is None else f', step={self.step}'}): {name}"]
        if parameters:
            said.append(f"{short_number(parameters)} parameters")
        said.append(f"step {figures.get('steps', 0):,} of {self.recipe.train.steps or '?'}")
        if "val_loss" in figures:
            said.append(f"validation loss {figures['val_loss']:.4f}")
        return ", ".join(said)

    def _repr_html_(self) -> str:
        """What a notebook shows: the headline figures."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th><td style='text-align:left'>{escape(value)}</td></tr>"
            for name, value in summary_rows(self._figures())
        )
        return f"<p>{escape(repr(self))}</p><table>{rows}</table>"


@brief
def train(
    recipe: Recipe,
    out: Path | str | None = None,
    *,
    nproc: int | tuple[int, int] | None = None,
    model: nn.Module | None = None,
    card: ModuleCard | None = None,
    data: BatchSource | None = None,
    val_data: BatchSource | None = None,
    callbacks: Sequence[CallbackLike] = (),
    metrics: Mapping[str, Metric | str] | None = None,
    loss: Loss | str | None = None,
    optimizer: Optimizer | str | None = None,
    schedule: Schedule | str | None = None,
    quiet: bool | None = None,
) -> Run:
    """Trains a recipe; returns the run.

    What is called back (`callbacks` to `schedule`) may be the object itself or its name, "module:name". Several ranks
    are separate processes, which import it by its name, so a lambda, or what a notebook defines, needs nproc=1.

    Args:
        out: run folder; None: a new one, runs/run-N.
        nproc: local ranks to start; None: as many as the recipe's layout says; (fewest, most): elastic. Under torchrun
            its ranks are used. Several ranks are separate processes that import your script. Guard it with
            `if __name__ == "__main__":`. Your model and data must pickle.
        model: your own module, called as model(inputs, targets) -> scalar mean loss, instead of the recipe's.
        card: what tp, pp and cp need to know of your module (docs/own_model.md).
        data: your own batches, data.batch(i, rows) -> (inputs, targets), instead of the recipe's. Batch i must not
            depend on anything but i.
        val_data: the same for validation, which uses its batch 0 with `train.val_sequences` rows.
        callbacks: `Callback` objects, or classes (perhaps `partial`), called on rank 0 around the steps.
        metrics: by name: functions (logits (n, V), targets (n)) -> their mean, measured at each validation.
        loss: (logits (N, V), targets (N), -100 where they do not count) -> the mean loss to train with, a scalar.
        optimizer: an `OptimizerCard`, or for plain data parallelism a class of torch.optim or a function (groups, lr).
        schedule: (step, steps) -> the learning rate of step 0 to steps - 1.
        quiet: print validations, warnings and alarms only; None: in notebooks.

    Raises:
        UserError: an error in recipe, layout, data or folder that the user can fix.
    """
    hooks, folder = brings(callbacks, metrics, loss, optimizer, schedule), None if out is None else Path(out)
    own: dict[str, Any] = {"module": model, "card": card, "batches": data, "val_batches": val_data}
    with quietly(_how(quiet)):
        return Run(run_command(recipe, nproc, folder, fork=False, brings=hooks, **own))


@brief
def resume(
    out: Path | str,
    recipe: Recipe | None = None,
    *,
    nproc: int | tuple[int, int] | None = None,
    model: nn.Module | None = None,
    card: ModuleCard | None = None,
    data: BatchSource | None = None,
    val_data: BatchSource | None = None,
    checkpoint: Path | str | None = None,
    callbacks: Sequence[CallbackLike] = (),
    metrics: Mapping[str, Metric | str] | None = None,
    loss: Loss | str | None = None,
    optimizer: Optimizer | str | None = None,
    schedule: Schedule | str | None = None,
    quiet: bool | None = None,
) -> Run:
    """Resumes a run from its last checkpoint, bit for bit.

    `recipe`: a changed recipe, such as one with more steps; None: the run's own. `checkpoint`: folder of the checkpoint
    to go back to; later ones are set aside. Other arguments are those of `train`. Model, data, loss, optimizer and
    schedule have to be brought again.
    """
    hooks, recipe = brings(callbacks, metrics, loss, optimizer, schedule), recipe or Run(out).recipe
    own: dict[str, Any] = {"module": model, "card": card, "batches": data, "val_batches": val_data}
    with quietly(_how(quiet)):
        return Run(run_command(recipe, nproc, Path(out), True, checkpoint, fork=False, brings=hooks, **own))


def _how(quiet: bool | None) -> str:
    """What `quietly` is told: little is printed if that is wanted, and by default in a notebook."""
    if quiet is None:  # the shells of hosted notebooks derive from Jupyter's
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        quiet = any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)
    return VALIDATIONS if quiet and not os.environ.get(QUIET) else ""
