"""The trackers that a run can write to: `observe.tracker`. `observe/trackers.py` has their code. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from fivefold.errors import UserError

NONE = "none"


class Tracker(NamedTuple):
    """module: the library that it needs. extra: the extra of Fivefold that brings it; "": Fivefold itself does."""

    module: str = ""
    extra: str = ""


TRACKERS = {
    "tensorboard": Tracker("tensorboard"),
    "csv": Tracker(),
    "wandb": Tracker("wandb", "wandb"),
    "mlflow": Tracker("mlflow", "mlflow"),
}


def joined(value: Any) -> Any:
    """A list of names as text. Recipes may have either."""
    listed = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
    return (",".join(value) or NONE) if listed else value


def chosen(text: str) -> list[str]:
    """The names in `observe.tracker`, each once."""
    names = [name.strip() for name in text.split(",")]
    return [] if names == [NONE] else list(dict.fromkeys(names))


def unknown(text: str) -> list[str]:
    """The names in `observe.tracker` that are no trackers."""
    return [name for name in chosen(text) if name not in TRACKERS]


def require(names: Sequence[str]) -> None:
    """Checks before anything starts that the libraries of trackers are installed.

    Raises:
        UserError: one is missing. The message names the extra that brings it.
    """
    for name in names:
        found = TRACKERS[name]
        if found.module and find_spec(found.module) is None:
            brings = f"fivefold[{found.extra}]" if found.extra else found.module
            raise UserError(
                f'observe.tracker = "{name}": the library {found.module} is not installed. Install it with '
                f"`pip install '{brings}'`, or leave {name} out"
            )
