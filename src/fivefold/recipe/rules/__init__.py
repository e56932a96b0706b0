"""The rules between the fields of a recipe. Each names the fields that it reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from fivefold.models.card import Contradiction
from fivefold.models.rules import model_rules
from fivefold.recipe.idle import refused
from fivefold.recipe.rules.apart import servers, sites
from fivefold.recipe.rules.arithmetic import offload, optimizer, precision
from fivefold.recipe.rules.batch import batch, length
from fivefold.recipe.rules.layout import experts, layout_rules, recomputation
from fivefold.recipe.rules.mixture import mixture
from fivefold.recipe.rules.texts import (
    conversations,
    generates,
    observed,
    packing,
    streamed,
    texts,
    vocabulary,
)
from fivefold.recipe.rules.weights import weights
from fivefold.recipe.schema import Sections
from fivefold.spread.layout import Layout

R = TypeVar("R", bound=Sections)

RULES = (
    texts,
    vocabulary,
    streamed,
    conversations,
    mixture,
    packing,
    generates,
    experts,
    length,
    optimizer,
    precision,
    recomputation,
    observed,
    refused,
    batch,
    sites,
    servers,
    offload,
    weights,
    layout_rules,
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
    """The recipe with all ranks as one site."""
    return recipe.model_copy(update={"sync": type(recipe.sync)()})


def allows(recipe: Sections, layout: Layout) -> bool:
    """True if the recipe with this layout breaks no rule."""
    return not any(contradictions(with_layout(recipe, layout)))
