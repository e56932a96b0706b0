"""Entries of lists in `[data]`: sources of a mixture, its stages, validation sets."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fivefold.models.section import LARGEST, Section

HELD_OUT = "held_out"
"""Name of the validation set that `data.val_fraction` holds out of a single source."""
Weight = Annotated[float, Field(ge=0, le=1e9)]


class SourceEntry(Section):
    """A `[[data.sources]]`."""

    name: str
    """Its name in the console, metrics and report: letters, digits, `_` and `-`."""
    source: str
    """What it is, as in `data.source`."""
    weight: Weight | None = None
    """Its share of the training data, relative to the others'. `data.weigh_by` says of what. Unset for all: each
    source's share is its size."""
    max_epochs: int | None = Field(default=None, ge=0, le=LARGEST)
    """Maximum number of passes over this source; a run that needs more is an error. 0: no limit. Unset:
    `data.max_epochs`."""
    text_key: str | None = None
    """Name of its text field. Unset: `data.text_key`."""


class StageEntry(Section):
    """A `[[data.stages]]`."""

    share: float = Field(gt=0, le=1)
    """Share of the run's steps. Those of all stages must sum to 1."""
    weights: dict[str, Weight] | None = None
    """Weights of its sources, such as `{web = 0.2, code = 0.8}`. Sources that it does not name are not used in this
    stage. Unset: the weights of the sources."""


class ValidationEntry(Section):
    """A `[[data.validation]]`."""

    name: str
    """Its name in the console, metrics and report: letters, digits, `_` and `-`."""
    source: str
    """What it is, as in `data.source`. All of it is for validation."""
    text_key: str | None = None
    """Name of its text field. Unset: `data.text_key`."""
