"""The files of the program: the trainer, and the packages that stand on it (`fivefold/wings.py`)."""

from pathlib import Path

import fivefold

SRC = Path(fivefold.__file__).parents[1]
PACKAGES = ("fivefold", "fivefold_plan", "fivefold_play")
FILES = [file for package in PACKAGES for file in sorted((SRC / package).rglob("*.py"))]
OWN_ROOMS = ("bench", "commands", "forecast", "foreign", "lessons", "trace")
"""Folders of `fivefold_plan` that are rooms of their own. All its others are one: the planner."""

LINES = [
    {"play"},
    {"plan.commands"},
    {"plan.lessons", "plan.forecast"},
    {"plan.bench", "plan.trace"},
    {"plan"},
    {"plan.foreign"},
    {"__init__", "__main__"},
    {"cli"},
    {"train"},
    {"step"},
    {"observe"},
    {"parallel", "checkpoint"},
    {"data", "comm"},
    {"recipe"},
    {"models", "optim"},
    {"kernels"},
    {"launch"},
    {"sharding"},
    {"schedules"},
    {"host"},
    {"files", "draw"},
    {"wings"},
    {"errors", "precision"},
]
"""The rooms from the top down. A room imports its own files and rooms on lower lines; rooms on one line do not know
each other."""


def name_of(file: Path) -> str:
    """`fivefold/cli/main.py`, `fivefold_plan/predict.py`."""
    return file.relative_to(SRC).as_posix()


def room_of(name: str) -> str:
    """The room of a file or a module, by its path or dotted name: `cli`, `plan.trace`, `plan`, `play`."""
    package, first, *_ = *name.removesuffix(".py").replace("/", ".").split("."), "__init__"
    if package == "fivefold":
        return first
    wing = package.removeprefix("fivefold_")
    return f"{wing}.{first}" if wing == "plan" and first in OWN_ROOMS else wing
