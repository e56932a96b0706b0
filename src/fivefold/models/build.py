"""Builds a model's module from its `[model]` section."""

from __future__ import annotations

import torch

from fivefold.models.base import LanguageModel
from fivefold.models.init import init_weights
from fivefold.models.registry import file_of
from fivefold.models.section import ModelSection


def build(model: ModelSection, *, device: torch.device | str = "meta", seed: int | None = 0) -> LanguageModel:
    """Builds the model of a resolved `[model]` section, in fp32.

    On device "meta" (the default) it has shapes and no memory. On others it is made on "meta" first, so that no weight
    is set twice, and then gets its initial weights (see `init_weights`). `seed=None` leaves its memory uninitialised,
    for a caller that loads weights at once.
    """
    with torch.device("meta"):
        module = file_of(model.arch, "module").Model(model)
    if torch.device(device).type == "meta":
        return module
    module.to_empty(device=device)
    if seed is not None:
        init_weights(module, seed, model)
    return module
