"""A run as every rank gets it, and what a user may bring to it: batches and a module."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from fivefold.data import DataSet
from fivefold.recipe import Recipe


class BatchSource(Protocol):
    """Where batches come from: `data.Batches`, or any object of the user's with this method."""

    def batch(self, i: int, rows: range) -> tuple[Any, Any]:
        """Inputs and targets (arrays or tensors, (len(rows), T) int64) of rows `rows` of global batch i."""
        ...


@dataclass(frozen=True)
class Job:
    """A run as every rank gets it. `recipe` is resolved; `data` is the recipe's data set, or None when the user
    brings `batches`; `module` the user's own model, in fp32 on the CPU, the same on every rank."""

    recipe: Recipe
    out: Path
    data: DataSet | None = None
    module: nn.Module | None = None
    batches: BatchSource | None = None
    val_batches: BatchSource | None = None
    resume: bool = False
    resume_command: str = ""
