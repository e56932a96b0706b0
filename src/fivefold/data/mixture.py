"""The mixture as data: what stands at each place of a run over one source or several.

`order_of` follows from the recipe and from how much there is of each source (order.py). What a run sees of each source
follows from it, before the run and after.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fivefold.data.batches import Order, Stage, items_in, steps_of, whole_weights
from fivefold.data.packing import DataSet, cut_of
from fivefold.data.stream import ENDLESS
from fivefold.errors import UserError
from fivefold.recipe import DataSection, LeftOut, Recipe, batch_size, place, sequences_before


class Amount(NamedTuple):
    """How much there is of a source: tokens to train on, items (sequences of an epoch), tokens held out (None: nothing
    shall be) and documents, if they are known."""

    tokens: int
    items: int
    held_out: int | None
    documents: int | None = None


def require_sequence(recipe: Recipe, name: str, tokens: int, items: int) -> None:
    """Raises UserError if a validation set has no sequence."""
    if not items:
        raise UserError(
            f"data.validation, {name}: {tokens:,} tokens, fewer than one sequence of model.seq_len = "
            f"{recipe.model.seq_len}"
        )


def without_limits(section: DataSection) -> DataSection:
    """The section without limits of epochs."""
    sources = tuple(entry.model_copy(update={"max_epochs": None}) for entry in section.sources)
    return section.model_copy(update={"max_epochs": 0, "sources": sources})


def weights_of(
    recipe: Recipe, sizes: Sequence[float], per_weight: Sequence[float] = ()
) -> Iterator[tuple[float, list[float]]]:
    """(share of the run, share of each source in it) of each stage. sizes: weights where the recipe gives none.
    per_weight: tokens per unit of a weight, if not the same for all."""
    section = recipe.data
    factors = per_weight or [1.0] * len(sizes)
    base = {entry.name: entry.weight for entry in section.sources}
    for share, own in [(stage.share, stage.weights) for stage in section.stages] or [(1.0, None)]:
        weights = base if own is None else {name: own.get(name, 0.0) for name in base}
        found = [
            size if weight is None else weight * factor
            for weight, size, factor in zip(weights.values(), sizes, factors, strict=True)
        ]
        total = math.fsum(found)
        yield share, [weight / total for weight in found]


def amounts(recipe: Recipe, data: DataSet) -> dict[str, Amount]:
    """How much there is of each source."""
    return {
        part.name: Amount(
            len(part.train),
            cut_of(recipe, data, part.train).count,
            None if part.val is None else len(part.val),
            part.info.get("documents", {}).get("train"),
        )
        for part in data.parts
    }


def order_of(recipe: Recipe, found: Mapping[str, Amount]) -> Order:
    """The order of a run over its sources.

    Raises:
        UserError: weights are those of documents, and a source does not know its own.
    """
    if not recipe.data.sources:
        return Order()
    per_weight: list[float] = []
    if recipe.data.weigh_by == "documents":
        for name, amount in found.items():
            if not amount.documents:
                raise UserError(
                    f'data.weigh_by = "documents": the number of documents of {name} is not known. Nearest valid: '
                    'weigh_by = "tokens"'
                )
            per_weight.append(amount.tokens / amount.documents)
    steps = steps_of(recipe)
    begins = recipe.data.first_steps(steps) if steps else [0]
    stages = weights_of(recipe, [float(amount.items) for amount in found.values()], per_weight)
    return Order(
        [
            Stage(sequences_before(recipe.train, begin), whole_weights(shares))
            for begin, (_, shares) in zip(begins, stages, strict=False)
        ]
    )


def uses(recipe: Recipe, order: Order, step: int, left_out: LeftOut = ()) -> list[int]:
    """Items of each source in the first `step` steps of a run."""
    end = place(recipe.train, step - 1, left_out) + batch_size(recipe.train, step - 1) if step else 0
    found = order.before(end)
    skipped = 0
    for after, size in left_out:
        if after < step:
            begin = sequences_before(recipe.train, after) + skipped
            parts = zip(found, order.before(begin + size), order.before(begin), strict=True)
            found, skipped = [n - (high - low) for n, high, low in parts], skipped + size
    return found


class Seen(NamedTuple):
    """What a run has seen of a source. share: of all its items."""

    items: int
    tokens: int
    epochs: float
    share: float


def seen(
    recipe: Recipe,
    found: Mapping[str, Amount],
    step: int,
    left_out: LeftOut = (),
    order: Order | None = None,
) -> dict[str, Seen]:
    """What the first `step` steps of a run see of each source. order: of `order_of`, if it is known."""
    used = uses(recipe, order or order_of(recipe, found), step, left_out)
    return {
        name: Seen(
            count, count * recipe.model.seq_len, count / max(1, amount.items), count / max(1, sum(used))
        )
        for (name, amount), count in zip(found.items(), used, strict=True)
    }


def passes(recipe: Recipe, found: Mapping[str, Amount]) -> dict[str, float]:
    """Passes of the run over each source."""
    return {name: row.epochs for name, row in seen(recipe, found, steps_of(recipe) or 0).items()}


def stages_in_words(recipe: Recipe, found: Mapping[str, Amount]) -> list[str]:
    """A line per stage: its first step, and the share of each source."""
    order, steps = order_of(recipe, found), steps_of(recipe)
    begins = recipe.data.first_steps(steps) if steps else [0]
    lines = []
    for begin, stage in zip(begins, order.stages, strict=True):
        whole = sum(stage.weights)
        shares = ", ".join(
            f"{name} {100 * weight / whole:.3g}%"
            for name, weight in zip(found, stage.weights, strict=True)
            if weight
        )
        lines.append(f"from step {begin + 1:,}: {shares}")
    return lines


def facts(recipe: Recipe, data: DataSet) -> dict[str, Any]:
    """What RUN/data.json keeps: how much there was of each source and validation set."""
    found, specs = amounts(recipe, data), recipe.data.specs
    infos = {part.name: part.info for part in data.parts}
    sources = [
        {
            "name": name,
            "source": specs[name],
            "fingerprint": infos[name].get("fingerprint"),
            **amount._asdict(),
            **({"tokens": None, "items": None} if amount.tokens == ENDLESS else {}),  # a stream's end
        }
        for name, amount in found.items()
    ]
    sets = [{"name": name, "tokens": len(tokens)} for name, tokens in data.validation_sets.items()]
    return {
        "sources": sources,
        "stages": stages_in_words(recipe, found) if data.mixed else [],
        "validation": sets,
    }


def require_enough(recipe: Recipe, found: Mapping[str, Amount]) -> None:
    """Checks that there is enough data.

    Raises:
        UserError: training has fewer sequences than one global batch, a source or what is held out of it has none, or
            the steps need more passes over a source than max_epochs allows.
    """
    T, B, data = recipe.model.seq_len, recipe.train.global_batch_size, recipe.data
    specs, tokens = data.specs, sum(amount.tokens for amount in found.values())
    said = {
        name: f"data.sources, {name}: {specs[name]}" if name else f"data.source: {specs[name]}"
        for name in specs
    }
    sequences = sum(amount.items for amount in found.values())
    if sequences < B:
        raise UserError(
            f"{said.get('', 'data.sources: their sum')} has {tokens:,} training tokens, "
            f"{sequences:,} sequences of model.seq_len = {T}: fewer than one batch of "
            f"train.global_batch_size = {B}. "
            + (f"Use at most {sequences} sequences per batch" if sequences else "Use a shorter model.seq_len")
            + ", or more text"
        )
    steps = steps_of(recipe)
    limits = {entry.name: entry.max_epochs for entry in data.sources}
    for (name, amount), count in zip(
        found.items(), uses(recipe, order_of(recipe, found), steps or 0), strict=True
    ):
        if amount.items < 1:
            raise UserError(
                f"{said[name]} has {amount.tokens:,} training tokens, fewer than one sequence of model.seq_len = {T}"
            )
        limit = data.max_epochs if limits.get(name) is None else limits[name]
        if limit and count > limit * amount.items:
            raise UserError(
                f"{said[name]} is too small for this run: {steps:,} steps of {B} sequences are "
                f"{count / amount.items:.2f} passes over its {amount.items:,} sequences, but "
                + (
                    f"its max_epochs allows {limit}. Give it a smaller weight. "
                    if limits.get(name) is not None
                    else f"data.max_epochs allows {limit}. "
                )
                + f"Use train.steps <= {int((steps or 0) * limit * amount.items / count):,}"
            )
        if amount.held_out is not None and items_in(recipe, amount.held_out) < 1:
            what = f"the validation part of {name}" if name else "the validation part"
            raise UserError(
                f"data.source: {what} has {amount.held_out:,} tokens, fewer than one sequence of "
                f"model.seq_len = {T}. Increase data.val_fraction = {data.val_fraction}, or set it to 0"
            )
