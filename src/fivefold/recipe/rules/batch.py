"""Rules of the length of a run and the sizes of its batches."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fivefold.errors import UserError
from fivefold.models.card import Contradiction
from fivefold.recipe.ramp import ramp, steps_for
from fivefold.recipe.schema import Sections
from fivefold.spread.servers import SERVER


def length(recipe: Sections) -> Iterator[Contradiction]:
    train, optim = recipe.train, recipe.optim
    if train.steps and train.tokens:
        yield {"train.steps", "train.tokens"}, "train.steps and train.tokens are both set; set only one"
    try:
        ramp(train)
    except UserError as error:
        yield {"train.batch_ramp"}, str(error)
        return
    steps = train.steps or (train.tokens and steps_for(train, -(-train.tokens // recipe.model.seq_len)))
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


def batch(recipe: Sections) -> Iterator[Contradiction]:
    """Every rank has microbatches, whole ones. Only some kinds of training need equally many on all."""
    train, count = recipe.train, recipe.layout.microbatches
    size, micro = train.global_batch_size, train.microbatch_size
    dp = recipe.layout.dp
    sizes = {name: getattr(recipe.layout, name) for name in ("dp_replicate", "dp_shard")}
    ranks = " x ".join(f"layout.{name} {n}" for name, n in sizes.items() if n > 1)
    equal = count or recipe.servers.count or recipe.sites.count > 1
    factors = {
        "layout.dp_replicate": (dp if equal else 1, ranks),
        "train.microbatch_size": (micro or 1, f"train.microbatch_size {micro}"),
        "layout.microbatches": (count or 1, f"layout.microbatches {count}"),
    }
    keys = {"train.global_batch_size", "layout.dp_replicate", "layout.dp_shard"}
    keys |= {key for key, (factor, _) in factors.items() if factor > 1}
    equation = " x ".join(words for factor, words in factors.values() if factor > 1)
    unit = math.prod(factor for factor, _ in factors.values())
    if size % unit:
        near = max(1, round(size / unit)) * unit
        yield (
            keys,
            f"train.global_batch_size = {size} must be divisible by {unit} ({equation}). Nearest valid: "
            f"train.global_batch_size = {near}",
        )
    elif micro and count and size != unit:
        yield keys, f"train.global_batch_size = {size} must be {unit} ({equation})"
    elif size // (micro or 1) < dp:
        near = f"train.global_batch_size = {dp * (micro or 1)}"
        smaller = next((n for n in range(min(size // dp, 4096), 0, -1) if size % n == 0), None)
        yield (
            keys,
            f"train.global_batch_size = {size}{f' with train.microbatch_size = {micro}' if micro else ''}: {dp} "
            f"data-parallel ranks need at least one {'microbatch' if micro else 'sequence'} each ({ranks}). Nearest "
            f"valid: {near}" + (f", or train.microbatch_size = {smaller}" if micro and smaller else ""),
        )
    for size in _ramped(recipe):
        if size > recipe.train.global_batch_size:
            yield (
                keys | {"train.batch_ramp"},
                f'train.batch_ramp = "{recipe.train.batch_ramp}": {size} sequences are more than '
                f"train.global_batch_size = {recipe.train.global_batch_size}, with which the ramp ends",
            )
        elif size % (unit // (count or 1)) or size < dp * (micro or 1):
            each, least = unit // (count or 1), dp * (micro or 1)
            multiple = f"a multiple of {each}, and " if each > 1 else ""
            product = " x ".join(filter(None, [ranks, factors["train.microbatch_size"][1] if micro else ""]))
            yield (
                keys | {"train.batch_ramp"},
                f'train.batch_ramp = "{recipe.train.batch_ramp}": {size} sequences must be {multiple}at least {least} '
                f"({product}). Nearest valid: {max(least, round(size / each) * each)}",
            )
    if recipe.train.batch_ramp:
        yield from _grows(recipe)


def _grows(recipe: Sections) -> Iterator[Contradiction]:
    """What needs batches of one size."""
    if recipe.optim.name == "sophia":
        yield (
            {"train.batch_ramp", "optim.name"},
            'train.batch_ramp does not combine with optim.name = "sophia", whose estimate goes by the tokens of a '
            'batch of one size. Nearest valid: train.batch_ramp = "", or optim.name = "adamw"',
        )
    if recipe.servers.count:
        yield (
            {"train.batch_ramp", "sync.method"},
            f'train.batch_ramp is not supported with sync.method = "{SERVER}": workers count batches of one size. '
            'Nearest valid: train.batch_ramp = ""',
        )
    if recipe.observe.noise_scale:
        yield (
            {"train.batch_ramp", "observe.noise_scale"},
            "observe.noise_scale averages over steps, whose batches must have one size; train.batch_ramp changes it. "
            "Nearest valid: observe.noise_scale = false",
        )


def _ramped(recipe: Sections) -> list[int]:
    """The sizes of batches before the full one."""
    try:
        return [size for size, _ in ramp(recipe.train)]
    except UserError:  # `length` says so
        return []
