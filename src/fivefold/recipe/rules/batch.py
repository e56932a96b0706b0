"""Rules of the length of a run, the sizes of its batches, and how often sites synchronise; numbers of the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fivefold.models.card import Contradiction
from fivefold.optim import FIELDS, OPTIMIZERS, OUTER
from fivefold.precision import PRECISIONS
from fivefold.recipe.messages import toml_value
from fivefold.recipe.ramp import ramp, run_steps
from fivefold.recipe.schema import Sections
from fivefold.sharding.layout import largest_divisor


def length(recipe: Sections) -> Iterator[Contradiction]:
    train, optim = recipe.train, recipe.optim
    if train.steps and train.tokens:
        yield {"train.steps", "train.tokens"}, "train.steps and train.tokens are both set; set only one"
    steps = run_steps(recipe)
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
    for size, _ in ramp(train):
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


def sites(recipe: Sections) -> Iterator[Contradiction]:
    """Sites are whole replicas. Each fragment synchronises once between two outer steps."""
    sync, model, replicas = recipe.sync, recipe.model, recipe.layout.dp_replicate
    if sync.method not in OUTER:
        return
    if sync.sites and replicas % sync.sites:
        yield (
            {"sync.sites", "layout.dp_replicate"},
            f"sync.sites = {sync.sites} must divide layout.dp_replicate = {replicas}: a site has whole replicas. "
            f"Nearest valid: sync.sites = {largest_divisor(replicas, sync.sites)}",
        )
        return
    most = min(sync.every, model.layers)
    if sync.fragments > most:
        yield (
            {"sync.fragments", "sync.every", "model.layers"},
            f"sync.fragments = {sync.fragments} must be at most sync.every = {sync.every} and model.layers = "
            f"{model.layers}: a fragment has at least one block, and a step synchronises one. Nearest valid: "
            f"sync.fragments = {most}",
        )
    if sync.overlap >= sync.every:
        yield (
            {"sync.overlap", "sync.every"},
            f"sync.overlap = {sync.overlap} must be less than sync.every = {sync.every}: a sum arrives before the next "
            f"one of its fragment starts. Nearest valid: sync.overlap = {sync.every - 1}",
        )


def optimizer(recipe: Sections) -> Iterator[Contradiction]:
    """Refuses fields that only other optimizers have, and a loss scale that rounds."""
    optim, scale, mode = recipe.optim, recipe.precision.loss_scale, PRECISIONS.get(recipe.precision.mode)
    own_fields = OPTIMIZERS[optim.name].fields
    for name in FIELDS:
        value = getattr(optim, name)
        if name in own_fields or value is None:
            continue
        has = f"its own fields: {', '.join(own_fields)}" if own_fields else "it has no field of its own"
        owner = next(card.name for card in OPTIMIZERS.values() if name in card.fields)
        yield (
            {f"optim.{name}", "optim.name"},
            f'optim.{name} = {toml_value(value)}: the optimizer "{optim.name}" has no such field ({has}). '
            f'Nearest valid: leave it out (--set optim.{name}=none), or optim.name = "{owner}"',
        )
    nearest = 2.0 ** round(math.log2(scale))
    if mode is not None and mode.scaled and scale != nearest:
        yield (
            {"precision.loss_scale"},
            f"precision.loss_scale = {scale:g} must be a power of two, so that scaling rounds nothing. Nearest valid: "
            f"{nearest:g}",
        )
