"""Every field of a recipe: its value, what it may hold, its default and what it means."""

from __future__ import annotations

from typing import Any, NamedTuple

from fivefold.recipe.fields import KEYS, allowed, optional
from fivefold.recipe.schema import Recipe


class Explained(NamedTuple):
    """One field; None as value or default means: worked out from the other fields."""

    key: str
    value: Any
    type: str
    default: Any
    doc: str
    is_default: bool


def explain(recipe: Recipe) -> list[Explained]:
    """All fields in the order of the schema."""
    values = {
        f"{section}.{name}": v
        for section, fields in recipe.model_dump().items()
        for name, v in fields.items()
    }
    rows = []
    for key, field in KEYS.items():
        type_ = allowed(field) + (", or unset" if optional(field) else "")
        doc = " ".join((field.description or "").split())
        rows.append(Explained(key, values[key], type_, field.default, doc, values[key] == field.default))
    return rows
