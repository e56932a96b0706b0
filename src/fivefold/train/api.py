"""The Python interface. Its functions do the same as the commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fivefold.checkpoint import store
from fivefold.checkpoint.hf import export_run
from fivefold.checkpoint.source import weights_of
from fivefold.models.own import ModuleCard
from fivefold.observe.metrics import read_metrics
from fivefold.observe.report import write_report
from fivefold.recipe import Recipe, load
from fivefold.train.evaluate import Evaluation, evaluate
from fivefold.train.generate import Sampling, generate_text, open_run, require_tokenizer
from fivefold.train.job import BatchSource
from fivefold.train.start import run_command


class Run:
    """A run folder: its recipe, metrics, weights and report."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.recipe = load(str(self.path / "recipe.toml"))

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: training, validation and samples."""
        return read_metrics(self.path / "metrics.jsonl")

    def generate(
        self,
        prompt: str = "",
        *,
        max_tokens: int = 128,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> str:
        """Text that the run's last checkpoint generates after the prompt.

        Raises:
            UserError: the run has no checkpoint or no tokenizer, or a sampling value is not allowed.
        """
        module, recipe, tokenizer = open_run(self.path)
        tokenizer = require_tokenizer(self.path, tokenizer)
        return "".join(
            generate_text(
                module, recipe.model, tokenizer, prompt, Sampling(max_tokens, temperature, top_k, top_p, seed)
            )
        )

    def evaluate(
        self,
        *texts: Path | str,
        tasks: Sequence[Path | str] = (),
        step: int | None = None,
        **how: Any,
    ) -> dict[str, Any]:
        """Perplexity and bits per byte of text files, accuracy on task files (docs/evaluation.md).

        step: of the checkpoint; None: the newest. how: fields of `Evaluation` (train/evaluate.py), such as shots=5.

        Raises:
            UserError: a file, line or setting cannot be used, or the run has no such checkpoint.
        """
        return evaluate(self.path, texts, tasks, Evaluation(**how), step=step)

    def checkpoints(self) -> list[Path]:
        """Folders of the run's checkpoints, oldest first."""
        return store.checkpoints(self.path)

    def weights(self) -> dict[str, Tensor]:
        """The weights of the last checkpoint, by name.

        Raises:
            UserError: the run has no checkpoint.
        """
        return weights_of(store.latest(self.path))

    def export(self, folder: Path | str, weights: Mapping[str, Tensor] | None = None) -> Path:
        """Writes the last checkpoint as a folder that Hugging Face `transformers` loads.

        weights: by name, to be written instead, such as those of a module of your own, merged into the recipe's model.
        """
        return export_run(self.path, Path(folder), weights=weights)

    def report(self) -> Path:
        """Writes report.html again and returns its path."""
        return write_report(self.path)


def train(
    recipe: Recipe,
    out: Path | str | None = None,
    *,
    nproc: int | tuple[int, int] | None = None,
    model: nn.Module | None = None,
    card: ModuleCard | None = None,
    data: BatchSource | None = None,
    val_data: BatchSource | None = None,
) -> Run:
    """Trains a recipe; returns the run.

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

    Raises:
        UserError: an error in recipe, layout, data or folder that the user can fix.
    """
    folder = None if out is None else Path(out)
    return Run(
        run_command(
            recipe, nproc, folder, fork=False, module=model, card=card, batches=data, val_batches=val_data
        )
    )


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
) -> Run:
    """Resumes a run from its last checkpoint, bit for bit.

    `recipe`: a changed recipe, such as one with more steps; None: the run's own. `checkpoint`: folder of the checkpoint
    to go back to; later ones are set aside. Other arguments are those of `train`.
    """
    recipe = recipe or Run(out).recipe
    return Run(
        run_command(
            recipe,
            nproc,
            Path(out),
            True,
            checkpoint,
            fork=False,
            module=model,
            card=card,
            batches=data,
            val_batches=val_data,
        )
    )
