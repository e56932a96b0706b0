"""Rules between the precision mode, the optimizer, and where their states are."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fivefold.models.card import Contradiction
from fivefold.optim import DEFAULT, FIELDS, OPTIMIZERS
from fivefold.precision import MASTER, PRECISIONS
from fivefold.recipe.schema import Sections
from fivefold.schedules.compression import NONE
from fivefold.spread.tiers import OFFLOADS


def precision(recipe: Sections) -> Iterator[Contradiction]:
    """Rules between the precision mode and what sums gradients."""
    name = recipe.precision.mode
    mode = PRECISIONS.get(name)
    if mode is None:  # auto
        return
    if recipe.precision.loss_scale != 2.0 ** round(math.log2(recipe.precision.loss_scale)):
        nearest = 2.0 ** round(math.log2(recipe.precision.loss_scale))
        yield (
            {"precision.loss_scale"},
            f"precision.loss_scale = {recipe.precision.loss_scale:g} must be a power of two, so that scaling rounds "
            f"nothing. Nearest valid: {nearest:g}",
        )
    if mode.scaled and recipe.layout.compress != NONE:
        yield (
            {"precision.mode", "layout.compress"},
            f'precision.mode = "{name}" is not supported with layout.compress: what compression keeps back would have '
            f'another loss scale later, and an overflow would stay in it. Nearest valid: compress = "{NONE}", or '
            'mode = "bf16"',
        )
    if mode.master != MASTER and recipe.layout.compress != NONE:
        yield (
            {"precision.mode", "layout.compress"},
            f'precision.mode = "{name}" is not supported with layout.compress, which keeps fp32 residuals. Nearest '
            f'valid: compress = "{NONE}", or mode = "bf16"',
        )
    card = OPTIMIZERS[recipe.optim.name]
    if mode.rounds and not card.elementwise:
        yield (
            {"precision.mode", "optim.name"},
            f'precision.mode = "{name}" is not supported with the optimizer "{card.name}", which updates whole '
            f'{card.needs}: only states of single elements are rounded. Nearest valid: optim.name = "{DEFAULT}", or '
            'mode = "bf16"',
        )
    if mode.rounds and recipe.precision.rounding == "kahan" and recipe.sites.count > 1:
        yield (
            {"precision.rounding", "sync.method"},
            'precision.rounding = "kahan" is not supported with several sites, whose outer steps replace the weights '
            'that the compensation belongs to. Nearest valid: rounding = "stochastic"',
        )
    if recipe.servers.count and (mode.scaled or mode.master != MASTER):
        why = (
            "weights of one server change before another knows of an overflow"
            if mode.scaled
            else "a server keeps fp32 masters"
        )
        yield (
            {"precision.mode", "sync.method"},
            f'precision.mode = "{name}" is not supported with parameter servers: {why}. Nearest valid: mode = "bf16"',
        )


def optimizer(recipe: Sections) -> Iterator[Contradiction]:
    """Refuses fields that only other optimizers have."""
    optim = recipe.optim
    own = OPTIMIZERS[optim.name].fields
    for name in FIELDS:
        value = getattr(optim, name)
        if name in own or value is None:
            continue
        have = f"its own fields: {', '.join(own)}" if own else "it has no field of its own"
        others = [card.name for card in OPTIMIZERS.values() if name in card.fields]
        value = list(value) if isinstance(value, tuple) else value
        yield (
            {f"optim.{name}", "optim.name"},
            f'optim.{name} = {value}: the optimizer "{optim.name}" has no such field ({have}). '
            f'Nearest valid: leave it out (--set optim.{name}=none), or optim.name = "{others[0]}"',
        )


def offload(recipe: Sections) -> Iterator[Contradiction]:
    """A streamed update runs chunk by chunk, beside the next step's forward."""
    layout, card = recipe.layout, OPTIMIZERS[recipe.optim.name]
    if not OFFLOADS[layout.offload].streams:
        return
    if not card.elementwise:
        yield (
            {"layout.offload", "optim.name"},
            f'layout.offload = "{layout.offload}" updates chunks of parameters, and the optimizer "{card.name}" '
            f'needs whole {card.needs}. Nearest valid: optim.name = "adamw", or layout.offload = "activations"',
        )
    if recipe.sites.count > 1:
        yield (
            {"layout.offload", "sync.method"},
            f'layout.offload = "{layout.offload}" does not combine with sync.method = "{recipe.sync.method}", whose '
            'outer steps change weights in memory. Nearest valid: layout.offload = "activations"',
        )
