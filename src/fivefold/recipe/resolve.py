"""Fills in the unset fields of a recipe, so that a saved recipe is explicit."""

from __future__ import annotations

import math
from typing import Any

from fivefold.errors import UserError
from fivefold.models import predicted
from fivefold.models.card import card_of, resolve_model
from fivefold.optim import OPTIMIZERS, OUTER
from fivefold.recipe.load import Recipe
from fivefold.recipe.ramp import ramp, run_steps, sequences_before
from fivefold.recipe.rules import contradictions
from fivefold.schedules.compression import compressor
from fivefold.sharding.layout import largest


def total_steps(recipe: Recipe) -> int:
    """Optimizer steps of the run: `train.steps`, or `train.tokens` rounded up to whole steps.

    Raises:
        UserError: the recipe gives neither.
    """
    steps = run_steps(recipe)
    if steps is None:
        raise UserError("recipe: set train.steps or train.tokens, the length of the run")
    return steps


def tokens_per_step(recipe: Recipe) -> int:
    """Tokens in an optimizer step with the full batch, over all ranks: B x T."""
    return recipe.train.global_batch_size * recipe.model.seq_len


def targets_per_step(recipe: Recipe) -> int:
    """Predicted tokens in an optimizer step with the full batch, over all ranks; those that the data leaves out, such
    as prompts of conversations, included."""
    objective = card_of(recipe.model).objective
    return recipe.train.global_batch_size * predicted(objective, recipe.model.seq_len)


def tokens_before(recipe: Recipe, step: int) -> int:
    """Tokens of all steps before this one (0, 1, ...), over all ranks."""
    return sequences_before(recipe.train, step) * recipe.model.seq_len


def microbatches_per_step(recipe: Recipe) -> int:
    """Microbatches in an optimizer step of the data-parallel rank that has most."""
    train, layout = recipe.train, recipe.layout
    whole = train.global_batch_size // (train.microbatch_size or 1)
    return largest(whole, layout.dp)


def resolve(recipe: Recipe, *, vocab_size: int) -> Recipe:
    """Fills in every unset field of a recipe. Set fields stay. Resolving twice changes nothing.

    `layout.microbatches` becomes `train.microbatch_size`, and `train.tokens` becomes `train.steps`. `data.cache` and
    `precision.mode = "auto"` stay as they are, because they depend on the machine.

    Args:
        vocab_size: number of token ids in the data (the tokenizer's size).

    Raises:
        UserError: `model.vocab_size` is smaller than `vocab_size`, the length of the run is not given, or the layout
            cannot divide a size that is known only now.
    """
    steps = total_steps(recipe)
    train: dict[str, Any] = {
        "steps": steps,
        "tokens": None,
        "microbatch_size": microbatch_size(recipe),
        "val_every": recipe.train.val_every or max(1, steps // 10),
    }
    layout: dict[str, int | None] = {"microbatches": None}
    compress = compressor(recipe.layout.compress)
    if compress is not None and recipe.layout.compress_after is None:
        layout["compress_after"] = int(compress.whole * steps)
    own = OPTIMIZERS[recipe.optim.name].fields
    optim: dict[str, Any] = {name: v for name, v in own.items() if getattr(recipe.optim, name) is None}
    sync: dict[str, Any] = {}
    if outer := OUTER.get(recipe.sync.method):
        own = {"outer_lr": outer.lr} | {f"outer_{name}": value for name, value in outer.fields.items()}
        sync = {name: value for name, value in own.items() if getattr(recipe.sync, name) is None}
    if recipe.optim.min_lr is None and recipe.optim.schedule != "constant":
        optim["min_lr"] = float(f"{recipe.optim.lr / 10:.12g}")
    if recipe.optim.schedule == "restarts" and recipe.optim.restart_steps is None:
        optim["restart_steps"] = max(1, steps // 4)
    if recipe.optim.warmup_steps is None:
        optim["warmup_steps"] = min(max(1, round(0.02 * steps)), 2000)
    resolved = recipe.model_copy(
        update={
            "model": resolve_model(recipe.model, vocab_size=vocab_size),
            "train": recipe.train.model_copy(update=train),
            "optim": recipe.optim.model_copy(update=optim),
            "layout": recipe.layout.model_copy(update=layout),
            "sync": recipe.sync.model_copy(update=sync),
        }
    )
    found = [message for _, message in contradictions(resolved)]
    if found:
        raise UserError(f"recipe: {'; '.join(found)}")
    return resolved


def microbatch_size(recipe: Recipe) -> int:
    """The microbatch size: the recipe's, or the one that `layout.microbatches` implies. Without either, it is the
    largest up to 8 that divides the batches and gives no rank more sequences than single ones would. A pipeline gets at
    least two microbatches per rank, if possible."""
    if recipe.train.microbatch_size:
        return recipe.train.microbatch_size
    if recipe.layout.microbatches:
        return recipe.train.global_batch_size // recipe.layout.dp // recipe.layout.microbatches
    return best_microbatch_size(recipe, 8)


def best_microbatch_size(recipe: Recipe, most: int) -> int:
    """The largest microbatch size up to `most` that delays no step."""
    dp = recipe.layout.dp
    sizes = [recipe.train.global_batch_size, *(size for size, _ in ramp(recipe.train))]
    slowest = [largest(size, dp) for size in sizes]
    share = math.gcd(*slowest)
    most = min(share, most) if recipe.layout.pp == 1 else max(1, min(most, share // (2 * recipe.layout.pp)))

    def delays_none(B: int) -> bool:
        return all(
            size % B == 0 and largest(size // B, dp) * B == least
            for size, least in zip(sizes, slowest, strict=True)
        )

    return max(B for B in range(1, most + 1) if delays_none(B))
