"""Fivefold: describe a training run once, train it in any layout.

    import fivefold

    recipe = fivefold.load("quickstart", ["train.steps=50"])
    run = fivefold.train(recipe, out="runs/first")
    print(run.generate("def "))

Names are imported when they are first used, so `import fivefold` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivefold.errors import RankFailed, UserError
    from fivefold.models.base import LanguageModel, build
    from fivefold.models.custom import ModuleCard
    from fivefold.observe.metrics import read_metrics
    from fivefold.recipe import Recipe, change, load, shipped, to_toml
    from fivefold.sharding.layout import Layout
    from fivefold.sharding.parts import Cut
    from fivefold.train.api import Run, resume, train
    from fivefold.train.user_hooks import Callback, Event
    from fivefold.train.verify import verify

    __version__: str

__all__ = [
    "Callback",
    "Cut",
    "Event",
    "LanguageModel",
    "Layout",
    "ModuleCard",
    "RankFailed",
    "Recipe",
    "Run",
    "UserError",
    "__version__",
    "build",
    "change",
    "load",
    "read_metrics",
    "resume",
    "shipped",
    "to_toml",
    "train",
    "verify",
]

_HOMES = {
    "errors": ("RankFailed", "UserError"),
    "models.base": ("LanguageModel", "build"),
    "models.custom": ("ModuleCard",),
    "observe.metrics": ("read_metrics",),
    "recipe": ("Recipe", "change", "load", "shipped", "to_toml"),
    "sharding.layout": ("Layout",),
    "sharding.parts": ("Cut",),
    "train.api": ("Run", "resume"),
    "train.user_hooks": ("Callback", "Event"),
    "train.verify": ("verify",),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("fivefold")
    if name == "train":  # the package of this name, which can be called
        return import_module("fivefold.train")
    for home, names in _HOMES.items():
        if name in names:
            return globals().setdefault(name, getattr(import_module(f"fivefold.{home}"), name))
    raise AttributeError(f"module 'fivefold' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
