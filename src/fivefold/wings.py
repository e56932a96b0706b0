"""The packages that stand on this one: the planner (`fivefold_plan`) and the page (`fivefold_play`). This package
imports none of them. It asks for a part by its name, and says in a sentence which package is missing.

A part is a module. `PARTS` says where ours stand; another distribution may bring a part under another name, as an entry
point of the group `fivefold.wings`, where ours are named, too.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from fivefold.errors import UserError

GROUP = "fivefold.wings"
PARTS = {
    "forecast": "fivefold_plan.forecast",  # train/forecast.py
    "configurations": "fivefold_plan.foreign",
    "scaling": "fivefold_plan.advice.scaling",
    "plan": "fivefold_plan.commands",
    "pages": "fivefold_play.recorded",
    "play": "fivefold_play.command",
}
INTERFACE = 1
"""Number of what the parts offer and use. A package that was made for another one is refused."""


class Missing(UserError):
    """A package that stands on this one is missing, broken, or was made for another version."""


@cache
def part(name: str) -> Any:
    """The module of a part. Raises Missing: there is none that can be used."""
    home = PARTS[name]
    if find_spec(home.partition(".")[0]) is None:
        home = _elsewhere(name)
    package = home.partition(".")[0]
    try:
        number = getattr(import_module(package), "INTERFACE", 0)
        if number != INTERFACE:
            raise Missing(
                f"the package {package} was made for another version of fivefold (interface {number}, here "
                f"{INTERFACE}): install both from one release"
            )
        return import_module(home)
    except ImportError as error:
        raise Missing(f"the package {package} cannot be imported: {error}") from None


def _elsewhere(name: str) -> str:
    """The module that another distribution names. Raises Missing: none does."""
    from importlib.metadata import entry_points  # slow

    for entry in entry_points(group=GROUP, name=name):
        if find_spec(entry.module.partition(".")[0]) is not None:
            return entry.module
    package = PARTS[name].partition(".")[0]
    raise Missing(f"the package {package} is missing; a whole installation of fivefold has it")
