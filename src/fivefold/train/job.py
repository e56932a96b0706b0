"""The job that every rank of a run gets, with the user's own batches and module if there are any."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from fivefold.comm.membership import Seat
from fivefold.data import DataSet
from fivefold.models.custom import ModuleCard
from fivefold.recipe import Recipe
from fivefold.train.initial import Initial
from fivefold.train.user_hooks import WITHOUT, UserHooks


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
