"""The rules between the fields of a recipe. Each names the fields that it reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from fivefold.models.card import Contradiction
from fivefold.models.rules import model_rules
from fivefold.recipe.rules import layout as layouts
from fivefold.recipe.rules import texts
from fivefold.recipe.rules.combinations import combinations, refused
from fivefold.recipe.schema import Sections
from fivefold.sharding.layout import Layout

R = TypeVar("R", bound=Sections)

RULES = (
    texts.texts,
    texts.vocabulary,
    texts.mixture,
    texts.documents,
    layouts.experts,
    layouts.length,
    layouts.optimizer,
    layouts.recomputation,
    texts.observed,
    refused,
    layouts.batch,
    layouts.servers,
    combinations,
    layouts.replica_groups,
    texts.weights,
    layouts.layout_rules,
)
"""Each yields what a recipe breaks; the first is what a user reads first."""


def contradictions(recipe: Sections) -> Iterator[Contradiction]:
    """Yields every rule that a recipe breaks. Its single fields are valid."""
    yield from model_rules(recipe.model, recipe.layout.tp)
    for rule in RULES:
        yield from rule(recipe)


def with_layout(recipe: R, layout: Layout, **train: Any) -> R:
    """The recipe with another layout, and other fields of [train]; not checked."""
    section = type(recipe.layout)(**vars(layout))
    return recipe.model_copy(update={"layout": section, "train": recipe.train.model_copy(update=train)})


def synchronous(recipe: R) -> R:
    """The recipe with all ranks as one replica group."""
    return recipe.model_copy(update={"sync": type(recipe.sync)()})


def allows(recipe: Sections, layout: Layout) -> bool:
    """True if the recipe with this layout breaks no rule."""
    return not any(contradictions(with_layout(recipe, layout)))
