"""What is allowed in a recipe, and most likely not meant."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.optim import DEFAULT, OPTIMIZERS
from fivefold.recipe.entries import steps as profiled_steps
from fivefold.recipe.load import Recipe
from fivefold.recipe.resolve import total_steps

MOST_EPOCHS = 4
"""Passes over the same text up to which each is worth about as much as new text (arXiv 2305.16264)."""
MOST_WARMUP = 0.5
"""Share of the run."""
MOST_CONTINUED = 6e-4
"""The highest peak learning rate of GPT-3's table: that of 125M parameters with Adam (arXiv 2005.14165)."""


def warnings(recipe: Recipe) -> list[str]:
    """One sentence per value that is most likely not meant, and what to do."""
    return [*_rates(recipe), *_intervals(recipe), *_waits(recipe)]


def warning_of_passes(passes: float) -> list[str]:
    """A warning if a run reads the same text too often."""
    if round(passes, 1) <= MOST_EPOCHS:
        return []
    return [
        f"{passes:,.1f} passes over the same text: beyond {MOST_EPOCHS} a model learns less and less from another one "
        "(arXiv 2305.16264). Use more text or fewer steps"
    ]


def _rates(recipe: Recipe) -> Iterator[str]:
    name = recipe.optim.name
    least, most = OPTIMIZERS[name].usual_lr
    for key in ("lr", "lr_embeddings", "lr_vectors"):
        lr = getattr(recipe.optim, key)
        if lr is not None and not least <= lr <= most:
            effect = "training will most likely diverge" if lr > most else "the weights will hardly change"
            yield f"optim.{key} = {lr:g}: {effect}; {name} is used with {least:g} to {most:g}"
    if recipe.train.init_from and name == DEFAULT and recipe.optim.lr > MOST_CONTINUED:
        why = "a rate for random weights, which may undo what those of train.init_from know"
        yield f"optim.lr = {recipe.optim.lr:g} is {why}; the recipe `continue` has a lower one"


def _intervals(recipe: Recipe) -> Iterator[str]:
    train, steps = recipe.train, total_steps(recipe)
    warmup, timed = recipe.optim.warmup_steps, recipe.checkpoint.minutes > 0
    for key, every, what in (
        ("train.val_every", train.val_every, "it is validated at the end only"),
        ("train.sample_every", train.sample_every, "a sample is written at the end only"),
        (
            "checkpoint.every",
            recipe.checkpoint.every,
            "only the end is saved" + ", beside what is due by checkpoint.minutes" * timed,
        ),
    ):
        if every > steps:
            yield f"{key} = {every:,} is more than the run's {steps:,} steps: {what}"
    if (profiled := profiled_steps(recipe.observe.profile_steps)) and profiled[-1] > steps:
        yield f"observe.profile_steps = {recipe.observe.profile_steps}: the run has {steps:,} steps"
    if warmup and warmup > MOST_WARMUP * steps:
        yield f"optim.warmup_steps = {warmup:,} of {steps:,} steps: the learning rate is below its peak most of the run"


def _waits(recipe: Recipe) -> Iterator[str]:
    timeout, hang_s = recipe.launch.timeout, recipe.observe.hang_s
    if timeout <= hang_s:
        what = f"launch.timeout = {timeout:g} is not longer than observe.hang_s = {hang_s:g}"
        yield f"{what}: a message fails before the rank that is missing can be named. Nearest valid: {hang_s + 1:g}"
