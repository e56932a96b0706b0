"""The model of a Hugging Face folder as fields of `[model]`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fivefold.files import read_json
from fivefold.models.card import card_of
from fivefold.models.hf import from_hf_config
from fivefold.models.section import ModelSection

LONGEST_CONTEXT = 2048
"""Tokens of a sequence that a Hugging Face model is trained on unless the recipe says more."""
HERE = {"freeze", "dropout", "depth", "base_dim", "base_layers"}
"""Fields of `[model]` that say how a run trains, and stay with it."""


def hf_model(folder: Path) -> dict[str, Any]:
    """The fields of `[model]` of a Hugging Face folder, for sequences of usual length."""
    return fields_of(from_hf_config(read_json(folder / "config.json"), folder))


def fields_of(model: ModelSection) -> dict[str, Any]:
    """The fields that a recipe takes from a model, for sequences of usual length."""
    fields = {name: v for name, v in model.model_dump(exclude_none=True).items() if name not in HERE}
    if card_of(model).rotary:
        fields["seq_len"] = min(model.seq_len, LONGEST_CONTEXT)
    return fields
