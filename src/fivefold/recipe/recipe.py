"""A recipe: its sections, checked against each other."""

from __future__ import annotations

from html import escape

from pydantic import model_validator

from fivefold.recipe.rules import contradictions
from fivefold.recipe.schema import Sections
from fivefold.recipe.words import to_toml


class Recipe(Sections):
    """A recipe. Sections may be left out, because every field but one of steps and tokens has a default.

    Raises:
        pydantic.ValidationError: a field is wrong, or fields contradict each other (see `rules/`).
    """

    @model_validator(mode="after")
    def _fields_agree(self) -> Recipe:
        found = [message for _, message in contradictions(self)]
        if found:
            raise ValueError("; ".join(found))
        return self

    def _repr_html_(self) -> str:
        """What a notebook shows: the recipe as TOML."""
        return f"<pre>{escape(to_toml(self))}</pre>"
