"""The job that every rank of a run gets, with the user's own batches and module if there are any; and what all of its
ranks, and the runs that resume it, must have in common."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from fivefold.checkpoint.source import TOKENIZER
from fivefold.comm.membership import Seat
from fivefold.data import DataSet
from fivefold.data.dataset import amounts, order_of
from fivefold.data.tokenizer import Tokenizer
from fivefold.files import expanded
from fivefold.models.custom import ModuleCard
from fivefold.recipe import Recipe
from fivefold.train.initial import Initial, recorded
from fivefold.train.user_hooks import WITHOUT, UserHooks

FINGERPRINT = "the data's fingerprint"  # a key of `identity`, stored in checkpoints
STAGES = "data.stages"  # [place at which it begins, weight of each source] of each stage
OWN = ("data", "checkpoint", "observe", "launch", "train.init_from", "layout.offload_dir", "layout.recompute")
"""Sections and fields in which the machines of a run may differ: paths (their contents count), what is kept and shown,
how long ranks wait, and what is computed again, which each site may choose by its own speed."""


class BatchSource(Protocol):
    """A source of batches: `data.Batches`, or any object of the user with this method.

    Targets below 0 do not count. If microbatches may differ in how many do, a source also has `uneven = True` and
    `counted(i, size)`, their number in the first `size` rows of batch i. Without, all microbatches weigh the same.
    """

    def batch(self, i: int, rows: range) -> tuple[Any, ...]:
        """Inputs and targets (arrays or tensors, (len(rows), T) int64) of rows `rows` of global batch i. A third array
        of that shape, or None, has the column at which the document of each token begins."""
        ...


@dataclass(frozen=True)
class Job:
    """The job of every rank.

    recipe: resolved. data: the recipe's data set, or None if the user brings `batches`. module: the user's own model,
    in fp32 on the CPU, the same on every rank. resume: goes on from the newest valid checkpoint; without one it starts
    from step 0. resume_from: the checkpoint to go on from instead, while the run has no newer one. seat: this launch's
    site, if each site is a launch of its own. asked: the recipe with the layout that was asked for, if there are not as
    many ranks now: what the run folder keeps. initial: the weights to start from, if they are not random.
    card: of the module, if its user gave one. own: callbacks, metrics and the like."""

    recipe: Recipe
    out: Path
    data: DataSet | None = None
    module: nn.Module | None = None
    batches: BatchSource | None = None
    val_batches: BatchSource | None = None
    resume: bool = False
    resume_command: str = ""
    seat: Seat | None = None
    resume_from: Path | None = None
    asked: Recipe | None = None
    initial: Initial | None = None
    card: ModuleCard | None = None
    own: UserHooks = WITHOUT


def tokenizer_to_keep(job: Job) -> Tokenizer | None:
    """The tokenizer whose file the run folder keeps. None: there is none, or `data.tokenizer` is that very file, as in
    an imported run."""
    own, named = job.out.absolute() / "tokenizer.json", job.recipe.data.tokenizer
    return job.data.tokenizer if job.data and expanded("data.tokenizer", named).absolute() != own else None


def shared(job: Job) -> dict[str, Any]:
    """What all ranks of a run must have in common, its sites and servers included, by name: the recipe's fields but
    those of `OWN`, and the contents of data and first weights, wherever they lie."""
    found = {
        f"{section}.{key}": value
        for section, fields in job.recipe.model_dump(mode="json").items()
        if section not in OWN
        for key, value in fields.items()
        if f"{section}.{key}" not in OWN
    }
    first = job.initial.fingerprint if job.initial else recorded(job.out)
    return found | {"the first weights": first} | identity(job)


def identity(job: Job) -> dict[str, Any]:
    """Those of the `shared` settings that determine the position in the data and the optimizer's states.

    A run cannot resume exactly if one of them has changed.
    """
    recipe = job.recipe
    found: dict[str, Any] = {
        "model.seq_len": recipe.model.seq_len,
        "train.global_batch_size": recipe.train.global_batch_size,
        "train.batch_ramp": recipe.train.batch_ramp,
        "train.seed": recipe.train.seed,
        "optim.name": recipe.optim.name,
    }
    if job.data is not None:
        found[FINGERPRINT] = job.data.info.get("fingerprint")
        found["data.packing"] = recipe.data.packing
        if (tokenizer := tokenizer_to_keep(job)) is not None:
            found[TOKENIZER] = tokenizer.fingerprint
        # The fingerprint is the files', and not that of the tokens which are taken of them
        if recipe.data.token_files:
            found["data.val_fraction"] = recipe.data.val_fraction
            if recipe.data.packing == "best_fit":
                found["data.end_token"] = recipe.data.end_token
        if job.data.mixed:
            stages = order_of(recipe, amounts(recipe, job.data)).stages
            found[STAGES] = [[stage.begin, *stage.weights] for stage in stages]
    return found | job.own.identity()
