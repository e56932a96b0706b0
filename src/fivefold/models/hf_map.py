"""An entry of a weight map between us and Hugging Face `transformers`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fivefold.errors import UserError
from fivefold.models.section import ModelSection


@dataclass(frozen=True)
class Entry:
    """One weight of ours and its counterpart there: one tensor, or several that ours stacks along dim 0."""

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = ()
    """Rows of our weight for each of several tensors there."""
    transpose: bool = False
    """True if it is stored transposed there (the `Conv1D` of GPT-2)."""


def same(ours: str, theirs: str, *kinds: str) -> list[Entry]:
    """Weights that differ in name only: `ours.kind` and `theirs.kind` for each kind (`weight`, `bias`)."""
    return [Entry(f"{ours}.{kind}", (f"{theirs}.{kind}",)) for kind in kinds or ("weight",)]


def experts(
    ours: str,
    theirs: str,
    model: ModelSection,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[Entry]:
    """The weights of routed experts, which have three matrices each there. names: gate, up, down."""
    D, F, E = model.dim, model.expert_ffn_dim or 0, model.experts or 0
    each, (gate, up, down) = [f"{theirs}.{number}" for number in range(E)], names
    both = tuple(f"{expert}.{name}.weight" for expert in each for name in (gate, up))
    return [
        Entry(f"{ours}.gate_up", both, (F,) * (2 * E)),
        Entry(f"{ours}.down", tuple(f"{expert}.{down}.weight" for expert in each), (D,) * E),
    ]


def refuse(name: str, model: ModelSection, theirs: Mapping[str, Any], *more: str) -> None:
    """Refuses a model whose fields have other values than a format can express. theirs: field -> its only value there.
    more: further "model.FIELD = VALUE" that it lacks.

    Raises:
        UserError: the model has any of these.
    """
    own = {field: getattr(model, field) for field in theirs}
    found = [f"model.{field} = {json.dumps(own[field])}" for field in theirs if own[field] != theirs[field]]
    if found := [*found, *more]:
        raise UserError(f"this model cannot be exported: {name}'s format has no {', '.join(found)}")
