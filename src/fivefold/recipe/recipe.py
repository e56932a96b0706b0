"""A recipe: its sections, checked against each other."""

from __future__ import annotations

from html import escape

from pydantic import model_validator

from fivefold.recipe.rules import contradictions
from fivefold.recipe.schema import Sections
from fivefold.recipe.words import to_toml
from fivefold.spread.layout import Layout
from fivefold.spread.layout_text import describe


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

    def __repr__(self) -> str:
        model, train = self.model, self.train
        length = f"{train.steps:,} steps" if train.steps else f"{train.tokens:,} tokens"
        shape = f"{model.arch}, {model.layers} layers, D {model.dim}, T {model.seq_len}"
        layout = describe(Layout.from_recipe(self.layout))
        return f"Recipe: {shape}; {length}, batch {train.global_batch_size}; {layout}"

    def _repr_html_(self) -> str:
        """What a notebook shows: a line, and behind it the recipe as TOML."""
        return f"<details><summary>{escape(repr(self))}</summary><pre>{escape(to_toml(self))}</pre></details>"
