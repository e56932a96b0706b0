"""What a recipe takes over from `train.init_from`: the fields of `[model]` that it leaves open, and the tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fivefold.errors import UserError, did_you_mean
from fivefold.files import expanded, guard, read_json

LONGEST_CONTEXT = 2048
"""Tokens of a sequence that a Hugging Face model is trained on unless the recipe says more."""
HERE = {"freeze", "dropout"}
"""Fields of `[model]` that say how a run trains, and stay with it."""


def home(where: str) -> Path | None:
    """The folder that describes the model of `train.init_from`: a run folder, also for one of its checkpoints, or a
    Hugging Face folder. None: there is none."""
    try:
        path = expanded("train.init_from", where)
        run = path.absolute().parent.parent
        if (path / "recipe.toml").is_file() or (path / "config.json").is_file():
            return path
        return (
            run if path.absolute().parent.name == "checkpoints" and (run / "recipe.toml").is_file() else None
        )
    except (OSError, ValueError):  # no path at all
        return None


def required(where: str) -> Path:
    """The same.

    Raises:
        UserError: there is none. The message names a similar one.
    """
    found = home(where)
    if found is not None:
        return found
    path = expanded("train.init_from", where)
    near = [path.parent, Path("runs")]
    try:
        known = {one.name: str(one) for parent in near for one in parent.glob("*") if home(str(one))}
    except OSError:
        known = {}
    what = "has neither recipe.toml nor config.json" if path.exists() else "no such folder"
    hint = did_you_mean(path.name, known)
    listed = f". There are {', '.join(sorted(known.values())[-5:])}" if known and not hint else ""
    raise UserError(
        f"train.init_from = {where}: {what}{hint or listed}. It must be a run folder, one of its checkpoints, or a "
        "Hugging Face folder"
    )


def taken_over(where: str, read: Callable[[Path], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Fields by section for a recipe that leaves them open. read: a recipe file as a table.

    A folder that is gone gives nothing: the recipe of a run is explicit, and whoever starts a run says what is missing.
    """
    folder = home(where)
    if folder is None:
        return {}
    guard(folder, look=False)
    if (folder / "recipe.toml").is_file():
        model = {name: v for name, v in _section(read(folder / "recipe.toml")).items() if name not in HERE}
    else:
        model = hf_model(folder)
    tokenizer = folder / "tokenizer.json"
    data = {"tokenizer": str(tokenizer.absolute())} if tokenizer.is_file() else {}
    return {"model": model, "data": data}


def hf_model(folder: Path) -> dict[str, Any]:
    """The fields of `[model]` of a Hugging Face folder, for sequences of usual length."""
    from fivefold.models.card import card_of
    from fivefold.models.hf import from_hf_config  # here: it imports torch

    model = from_hf_config(read_json(folder / "config.json"), folder)
    fields = {name: v for name, v in model.model_dump(exclude_none=True).items() if name not in HERE}
    if card_of(model).rotary:
        fields["seq_len"] = min(model.seq_len, LONGEST_CONTEXT)
    return fields


def _section(table: dict[str, Any]) -> dict[str, Any]:
    model = table.get("model", {})
    if not isinstance(model, dict):
        raise UserError("train.init_from: its recipe.toml has no section [model]")
    return model
