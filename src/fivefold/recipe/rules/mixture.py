"""Rules of a mixture of sources, its stages, and validation sets."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from fivefold.errors import did_you_mean
from fivefold.models.card import Contradiction
from fivefold.recipe.entries import HELD_OUT
from fivefold.recipe.messages import toml_value
from fivefold.recipe.ramp import run_steps
from fivefold.recipe.schema import DataSection, Sections

_NAME = re.compile(r"[A-Za-z0-9_-]{1,60}", re.ASCII)
_CLOSE = 1e-6


def mixture(recipe: Sections) -> Iterator[Contradiction]:
    data, default = recipe.data, type(recipe.data).model_fields["source"].default
    yield from _names(data)
    if data.sources and data.source != default:
        yield (
            {"data.source", "data.sources"},
            f"data.source = {toml_value(data.source)} and data.sources are both set; set only one",
        )
    weights = [entry.weight for entry in data.sources]
    if None in weights and any(weight is not None for weight in weights):
        lacking = ", ".join(entry.name for entry in data.sources if entry.weight is None)
        yield (
            {"data.sources"},
            f"data.sources: {lacking} has no weight, and others have one. Set all weights, or none (then each source's "
            "share is its size)",
        )
    if weights and not any(weight != 0 for weight in weights) and not data.stages:
        yield {"data.sources"}, "data.sources: every weight is 0; at least one must be > 0"
    if data.stages:
        yield from _stages(recipe)


def _names(data: DataSection) -> Iterator[Contradiction]:
    """Names are keys of metrics. Validation sets and held-out parts of sources have one list of names."""
    taken = {HELD_OUT} if data.validation and data.val_fraction and not data.sources else set[str]()
    for key, entries in (("data.sources", data.sources), ("data.validation", data.validation)):
        for entry in entries:
            if not _NAME.fullmatch(entry.name):
                yield (
                    {key},
                    f"{key}: name = {toml_value(entry.name[:80])}: must be 1 to 60 letters, digits, _ and -",
                )
            elif entry.name in taken:
                yield {key}, f"{key}: the name {entry.name} comes twice; each needs its own"
            taken.add(entry.name)


def _stages(recipe: Sections) -> Iterator[Contradiction]:
    data, keys = recipe.data, {"data.stages", "data.sources"}
    if not data.sources:
        yield keys, "data.stages: they weigh the sources of a mixture, and there is no [[data.sources]]"
        return
    names = [entry.name for entry in data.sources]
    total = math.fsum(stage.share for stage in data.stages)
    if abs(total - 1) > _CLOSE:
        shares = " + ".join(f"{stage.share:g}" for stage in data.stages)
        yield {"data.stages"}, f"data.stages: the shares {shares} sum to {total:g}; they must sum to 1"
    for number, stage in enumerate(data.stages, 1):
        own = {entry.name: entry.weight for entry in data.sources} if stage.weights is None else stage.weights
        for name in own:
            if name not in names:
                known = did_you_mean(name, names) or f"; there are {', '.join(names)}"
                yield (
                    keys,
                    f"data.stages: stage {number} has a weight of {name[:80]}, which is no source{known}",
                )
        if not any(weight != 0 for weight in own.values()):
            yield keys, f"data.stages: every weight of stage {number} is 0; at least one must be > 0"
    if (steps := run_steps(recipe)) and abs(total - 1) <= _CLOSE:
        begins = [*data.first_steps(steps), steps]
        for number, stage in enumerate(data.stages, 1):
            if begins[number] <= begins[number - 1]:
                yield (
                    {"data.stages", "train.steps", "train.tokens"},
                    f"data.stages: stage {number} with share = {stage.share:g} has no step in a run of {steps}. "
                    f"Nearest valid: share = {1 / steps:.3g}",
                )
