"""Whether a set is large enough for what the recipe asks."""

from __future__ import annotations

from fivefold.data.batches import count_sequences
from fivefold.errors import UserError
from fivefold.recipe import Recipe, total_steps


def objective_of(recipe: Recipe) -> str:
    return "mlm" if recipe.model.arch == "bert" else "causal"


def steps_of(recipe: Recipe) -> int | None:
    """Optimizer steps of the run; None if it does not say (data may be prepared without training)."""
    return total_steps(recipe) if recipe.train.steps or recipe.train.tokens else None


def epochs(recipe: Recipe, train_tokens: int) -> float:
    """How often the run goes through its training set."""
    sequences = count_sequences(train_tokens, recipe.model.seq_len, objective_of(recipe))
    return (steps_of(recipe) or 0) * recipe.train.global_batch_size / max(1, sequences)


def require_enough(recipe: Recipe, train_tokens: int, val_tokens: int | None) -> None:
    """Raises UserError when training has fewer sequences than one global batch, validation has none, or the
    steps need more passes over the set than data.max_epochs allows. val_tokens None: no validation."""
    T, B, limit = recipe.model.seq_len, recipe.train.global_batch_size, recipe.data.max_epochs
    sequences = count_sequences(train_tokens, T, objective_of(recipe))
    if sequences < B:
        raise UserError(
            f"data.source: {recipe.data.source} gives {train_tokens:,} training tokens, "
            f"{sequences:,} sequences of model.seq_len = {T}: fewer than one batch of "
            f"train.global_batch_size = {B}; "
            + (
                f"use at most {sequences} sequences a batch, "
                if sequences
                else "use a shorter model.seq_len "
            )
            + "or more text"
        )
    steps = steps_of(recipe)
    if limit and steps and steps * B > limit * sequences:
        raise UserError(
            f"data.source: {recipe.data.source} is too small for the steps asked: {steps:,} steps of {B} "
            f"sequences are {steps * B / sequences:.2f} passes over its {sequences:,} sequences, and "
            f"data.max_epochs allows {limit}: use train.steps <= {limit * sequences // B:,}"
        )
    if val_tokens is not None and count_sequences(val_tokens, T, objective_of(recipe)) < 1:
        raise UserError(
            f"data.source: the validation part holds {val_tokens:,} tokens, fewer than one sequence of "
            f"model.seq_len = {T}: raise data.val_fraction = {recipe.data.val_fraction}, or set it to 0"
        )
