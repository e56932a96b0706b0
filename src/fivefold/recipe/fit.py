"""Layouts for another number of ranks than the recipe's: what an elastic run goes on with when ranks leave or join."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import TypeVar

from fivefold.errors import UserError
from fivefold.models.card import card_of
from fivefold.recipe.load import Recipe
from fivefold.recipe.ramp import ramp
from fivefold.recipe.resolve import best_microbatch_size, microbatch_size
from fivefold.recipe.rules import contradictions, with_layout
from fivefold.schedules.collectives.choose import AUTO
from fivefold.schedules.compression import NONE
from fivefold.sharding.layout import Layout, divisors, to_text

MOST_TRIED = 2000  # layouts: each takes about a millisecond
TRIED = 3  # numbers of data-parallel ranks for one division of the model: some algorithms do not take every number
R = TypeVar("R", bound=Recipe)


@dataclass(frozen=True)
class Fit:
    """The recipe in the nearest layout for some ranks. ranks: those that it uses; the others are spare. line: what is
    different from the recipe, for people; "" if nothing is."""

    recipe: Recipe
    ranks: int
    line: str


def nearest_layout(recipe: Recipe, ranks: int) -> Fit:
    """The nearest valid layout of at most `ranks` ranks. It trains the same: the same batches in the same order.

    What divides the model (pp, cp, tp, ep) stays as it is if that many ranks are left, and becomes smaller by the
    fewest doublings if not. As many data-parallel ranks as possible share the batch, in unequal shares if need be. A
    mixture of experts keeps its microbatches, over which it computes its balance loss.

    Raises:
        UserError: there is none; or the number of ranks is part of what is trained.
    """
    asked = Layout.from_recipe(recipe.layout)
    if asked.ranks == ranks:
        return Fit(recipe, ranks, "")
    if recipe.sites.count > 1 or recipe.servers.count:
        raise UserError(
            f'the recipe has {asked.ranks} ranks and not {ranks}: with sync.method = "{recipe.sync.method}" their '
            "number changes what is trained"
        )
    pinned = with_layout(recipe, replace(asked, microbatches=None), microbatch_size=microbatch_size(recipe))
    for layout in islice(_nearest(asked, ranks, recipe.train.global_batch_size), MOST_TRIED):
        found = in_layout(pinned, layout)
        if not any(contradictions(found)):
            return Fit(found, layout.ranks, _line(pinned, found, ranks))
    raise UserError(
        f"layout '{to_text(asked)}': none of the {MOST_TRIED:,} nearest layouts of {ranks} or fewer ranks is valid for "
        "this recipe"
    )


def in_layout(recipe: R, layout: Layout) -> R:
    """The recipe in another layout, not checked. A microbatch size of the recipe's is the most that fits into memory:
    it becomes smaller where that makes shares more equal, or where there would be fewer microbatches than ranks."""
    changed = with_layout(recipe, replace(layout, microbatches=None))
    most = recipe.train.microbatch_size
    if most is None:
        return changed
    if card_of(recipe.model).has_experts:  # the balance loss of a microbatch is part of what is trained
        sizes = [recipe.train.global_batch_size, *(size for size, _ in ramp(recipe.train))]
        size = next(B for B in range(most, 0, -1) if B == 1 or _deals(sizes, B, layout.dp))
    else:
        size = best_microbatch_size(changed, most)
    return with_layout(changed, Layout.from_recipe(changed.layout), microbatch_size=size)


def _deals(sizes: list[int], B: int, ranks: int) -> bool:
    """True if batches of these sizes have whole microbatches of B sequences, at least one for each rank."""
    return all(size % B == 0 and size // B >= ranks for size in sizes)


def _nearest(asked: Layout, ranks: int, batch: int) -> Iterator[Layout]:
    """Layouts of at most `ranks` ranks, the nearest first."""
    for layout in _divisions(asked, ranks):
        most = min(ranks // (layout.pp * layout.cp * layout.tp), batch)
        whole = (dp for dp in range(most, 0, -1) if dp * layout.cp % layout.ep == 0)
        for dp in islice(whole, TRIED):
            for sharing in _sharings(layout, dp):
                yield sharing
                yield replace(sharing, all_reduce=AUTO, zeropp=NONE)


def _divisions(asked: Layout, ranks: int) -> Iterator[Layout]:
    """The divisions of the model that need no more ranks: those with the fewest halvings first, and of these those that
    leave fewest ranks over."""
    before = (asked.pp, asked.cp, asked.tp, asked.ep)
    sizes = product(*(range(1, size + 1) for size in before[:3]), divisors(asked.ep))

    def distance(after: tuple[int, ...]) -> tuple[float, int]:
        halvings = sum(math.log2(old / new) for old, new in zip(before, after, strict=True))
        return round(halvings, 6), ranks % math.prod(after[:3])

    for pp, cp, tp, ep in sorted((s for s in sizes if math.prod(s[:3]) <= ranks), key=distance):
        cut = asked.sp and tp > 1
        yield replace(asked, pp=pp, cp=cp, tp=tp, ep=ep, sp=cut, sp_regather=cut and asked.sp_regather)


def _sharings(layout: Layout, dp: int) -> Iterator[Layout]:
    """The layout with so many data-parallel ranks: with as many shards as before; with all ranks as shards; without."""
    if layout.zero:
        for shards in dict.fromkeys((layout.dp_shard, dp)):
            if dp % shards == 0 and shards * layout.cp > 1:
                yield replace(layout, dp_replicate=dp // shards, dp_shard=shards)
    yield replace(layout, dp_replicate=dp, dp_shard=1, zero=0)


def _line(asked: Recipe, found: Recipe, ranks: int) -> str:
    before, after = Layout.from_recipe(asked.layout), Layout.from_recipe(found.layout)
    text = f"{ranks} rank{'s' * (ranks != 1)} instead of {before.ranks}: layout {to_text(after)} for {to_text(before)}"
    if spare := ranks - after.ranks:
        text += f"; {spare} rank{'s' * (spare > 1)} left over"
    old, new = asked.train.microbatch_size, found.train.microbatch_size
    if old != new:
        text += f"; microbatches of {new} for {old}"
        if card_of(found.model).has_experts:
            text += ", which changes the balance loss of experts"
    return text
