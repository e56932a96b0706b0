"""What fields of a recipe must agree on. Each rule names the fields it looked at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fivefold.layout import Layout, problems

if TYPE_CHECKING:
    from fivefold.recipe.schema import Recipe

Contradiction = tuple[set[str], str]
"""The keys that disagree, and what must hold between them."""


def contradictions(recipe: Recipe) -> Iterator[Contradiction]:
    """Every rule that a recipe breaks, its single fields being valid."""
    yield from _model(recipe)
    yield from _length(recipe)
    yield from _batch(recipe)
    yield from _layout(recipe)


def _model(recipe: Recipe) -> Iterator[Contradiction]:
    model = recipe.model
    if model.dim % model.heads:
        yield (
            {"model.dim", "model.heads"},
            f"model.dim = {model.dim} must be divisible by model.heads = {model.heads}",
        )
    elif model.arch == "llama" and model.dim // model.heads % 2:
        yield (
            {"model.dim", "model.heads"},
            f"model.dim / model.heads = {model.dim // model.heads} must be even: RoPE turns pairs",
        )
    if model.kv_heads and model.heads % model.kv_heads:
        yield (
            {"model.kv_heads", "model.heads"},
            f"model.kv_heads = {model.kv_heads} must divide model.heads = {model.heads}",
        )
    if model.arch != "llama":
        if model.kv_heads and model.kv_heads != model.heads:
            yield (
                {"model.kv_heads", "model.heads"},
                f"{model.arch} has as many kv_heads as heads (only llama has fewer)",
            )
        if model.rope_theta != 10000.0:
            yield (
                {"model.rope_theta"},
                f"model.rope_theta: {model.arch} has no rotary positions (only llama has)",
            )
    if model.arch == "bert" and recipe.train.sample_every:
        yield (
            {"train.sample_every"},
            "train.sample_every: bert sees both sides of a token and generates no text",
        )


def _length(recipe: Recipe) -> Iterator[Contradiction]:
    train, optim = recipe.train, recipe.optim
    if train.steps and train.tokens:
        yield {"train.steps", "train.tokens"}, "train.steps and train.tokens are both given: give one of them"
    steps = train.steps or (
        train.tokens and -(-train.tokens // (train.global_batch_size * recipe.model.seq_len))
    )
    if steps and optim.warmup_steps and optim.warmup_steps > steps:
        yield (
            {"optim.warmup_steps", "train.steps", "train.tokens", "train.global_batch_size", "model.seq_len"},
            f"optim.warmup_steps = {optim.warmup_steps} must be at most the run's {steps} steps",
        )
    if optim.min_lr is not None and optim.min_lr > optim.lr:
        yield (
            {"optim.min_lr", "optim.lr"},
            f"optim.min_lr = {optim.min_lr} must be at most optim.lr = {optim.lr}",
        )


def _batch(recipe: Recipe) -> Iterator[Contradiction]:
    size, micro, count = (
        recipe.train.global_batch_size,
        recipe.train.microbatch_size,
        recipe.layout.microbatches,
    )
    dp = recipe.layout.dp_replicate * recipe.layout.dp_shard
    keys = {"train.global_batch_size", "layout.dp_replicate", "layout.dp_shard"}
    equation = f"{dp} data-parallel ranks"
    unit = dp
    if micro:
        keys, equation, unit = (
            keys | {"train.microbatch_size"},
            f"{equation} x microbatch_size {micro}",
            unit * micro,
        )
    if count:
        keys, equation, unit = (
            keys | {"layout.microbatches"},
            f"{equation} x {count} microbatches",
            unit * count,
        )
    if size % unit:
        yield keys, f"train.global_batch_size = {size} must be divisible by {unit} ({equation})"
    elif micro and count and size != unit:
        yield keys, f"train.global_batch_size = {size} must be {unit} ({equation})"


def _layout(recipe: Recipe) -> Iterator[Contradiction]:
    model, layout = recipe.model, recipe.layout
    for names, message in problems(Layout.from_recipe(layout)):
        yield {f"layout.{name}" for name in names}, f"layout: {message}"
    kv_heads = model.kv_heads or model.heads
    if kv_heads % layout.tp:
        name = "kv_heads" if model.kv_heads else "heads"
        yield {f"model.{name}", "layout.tp"}, f"layout.tp = {layout.tp} must divide model.{name} = {kv_heads}"
    if model.seq_len % layout.cp:
        yield (
            {"model.seq_len", "layout.cp"},
            f"layout.cp = {layout.cp} must divide model.seq_len = {model.seq_len}",
        )
    stages = layout.pp * layout.virtual_stages
    if stages > model.layers:
        yield (
            {"model.layers", "layout.pp", "layout.virtual_stages"},
            f"layout.pp x layout.virtual_stages = {stages} stages, more than model.layers = {model.layers}",
        )
