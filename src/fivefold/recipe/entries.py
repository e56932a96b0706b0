"""Fields that are more than a number or a word: entries of lists in `[data]` (sources of a mixture, its stages,
validation sets), and the texts of `[observe]`: `tracker` (`observe/trackers.py` has the code) and `profile_steps`. No
torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from fivefold.errors import UserError
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


NONE = "none"


TRACKERS = {
    "tensorboard": ("tensorboard", ""),
    "csv": ("", ""),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow"),
}
"""(the library that each needs, the extra of Fivefold that brings it; "": none, and Fivefold itself)."""


def joined(value: Any) -> Any:
    """A list of names as text. Recipes may have either."""
    listed = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
    return (",".join(value) or NONE) if listed else value


TrackerNames = Annotated[str, BeforeValidator(joined)]


def chosen(text: str) -> list[str]:
    """The names in `observe.tracker`, each once."""
    names = [name.strip() for name in text.split(",")]
    return [] if names == [NONE] else list(dict.fromkeys(names))


def require(names: Sequence[str]) -> None:
    """Checks before anything starts that the libraries of trackers are installed. Raises UserError: one is missing. The
    message names the extra that brings it."""
    for name in names:
        module, extra = TRACKERS[name]
        if module and find_spec(module) is None:
            brings = f"fivefold[{extra}]" if extra else module
            raise UserError(
                f'observe.tracker = "{name}": the library {module} is not installed. Install it with '
                f"`pip install '{brings}'`, or leave {name} out"
            )


MOST = 100
"""Steps of a profile. It stays in memory until it is written."""
_STEPS = re.compile(r"(\d{1,12})(?:-(\d{1,12}))?", re.ASCII)


def as_text(value: Any) -> Any:
    """A single step as text. Recipes may have it as a number."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Steps = Annotated[str, BeforeValidator(as_text)]


def steps(text: str) -> range:
    """The steps that "10-12" or "10" names; "" names none. Raises ValueError: it does not name steps, or names too
    many. The message says what is allowed."""
    if not text:
        return range(0)
    found = _STEPS.fullmatch(text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if first < 1 or last < first:
        raise ValueError('must be a step, such as "10", or steps from a first to a last, such as "10-12"')
    if last - first >= MOST:
        raise ValueError(f'has more than {MOST} steps. Nearest valid: "{first}-{first + MOST - 1}"')
    return range(first, last + 1)
