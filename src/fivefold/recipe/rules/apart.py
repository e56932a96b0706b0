"""Rules of ranks that compute apart: sites, parameter servers."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.models.card import Contradiction, card_of
from fivefold.optim import OPTIMIZERS
from fivefold.optim.registry import OUTER
from fivefold.recipe.schema import Sections
from fivefold.recipe.words import toml_value
from fivefold.spread.servers import SERVER
from fivefold.spread.shares import largest_divisor


def sites(recipe: Sections) -> Iterator[Contradiction]:
    """Rules of training on sites that synchronise every few steps."""
    sync, model, replicas = recipe.sync, recipe.model, recipe.layout.dp_replicate
    if sync.method not in OUTER:
        return
    if sync.outer_momentum is not None and "momentum" not in OUTER[sync.method].fields:
        yield (
            {"sync.outer_momentum", "sync.method"},
            f'sync.outer_momentum = {sync.outer_momentum}: sync.method = "{sync.method}" takes the mean weights, '
            'without momentum. Nearest valid: leave it out, or sync.method = "diloco"',
        )
    if sync.sites and replicas % sync.sites:
        nearest = largest_divisor(replicas, sync.sites)
        yield (
            {"sync.sites", "layout.dp_replicate"},
            f"sync.sites = {sync.sites} must divide layout.dp_replicate = {replicas}: a site has whole replicas. "
            f"Nearest valid: sync.sites = {nearest}",
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
    if recipe.sites.count > 1:
        yield from _unsupported_apart(recipe)


def _unsupported_apart(recipe: Sections) -> Iterator[Contradiction]:
    """What several sites do not support."""
    method = f'sync.method = "{recipe.sync.method}"'
    if card_of(recipe.model).has_experts:
        yield (
            {"sync.method", "model.arch"},
            f'{method} is not supported with model.arch = "{recipe.model.arch}": each site would balance its experts '
            'by itself. Nearest valid: sync.method = "all"',
        )
    if recipe.observe.noise_scale:
        yield (
            {"sync.method", "observe.noise_scale"},
            f"observe.noise_scale cannot be measured with {method}: no step has the gradient of the whole batch. "
            "Nearest valid: observe.noise_scale = false",
        )


def servers(recipe: Sections) -> Iterator[Contradiction]:
    """A worker of parameter servers has the whole model, and its gradients leave it as they are."""
    if not recipe.servers.count:
        return
    method = f'sync.method = "{SERVER}"'
    plain, mine = type(recipe.layout)(), recipe.layout
    free = ("dp_replicate", "microbatches", "recompute")
    others = [name for name in type(mine).model_fields if name not in free]
    if wrong := [name for name in others if getattr(mine, name) != getattr(plain, name)]:
        given = ", ".join(f"layout.{name} = {toml_value(getattr(mine, name))}" for name in wrong)
        yield (
            {"sync.method", *(f"layout.{name}" for name in wrong)},
            f"{method} combines with dp only: each worker has the whole model, and servers keep its states ({given}). "
            f'Nearest valid: layout dp={mine.dp}, or sync.method = "all"',
        )
    if card_of(recipe.model).has_experts:
        yield (
            {"sync.method", "model.arch"},
            f'{method} is not supported with model.arch = "{recipe.model.arch}": each worker would balance its experts '
            'by itself. Nearest valid: sync.method = "all"',
        )
    faults = recipe.faults
    for key, value, none in (
        ("train.z_loss", recipe.train.z_loss, 0.0),
        ("faults.on_spike", faults.on_spike, "tell"),
        ("faults.on_nonfinite", "skip" if faults.on_nonfinite == "abort" else faults.on_nonfinite, "skip"),
        ("faults.hash_every", faults.hash_every, 0),
    ):
        if value != none:
            yield (
                {"sync.method", key},
                f"{key} = {toml_value(value)} is not supported with {method}, whose workers and servers have steps of "
                f"their own. Nearest valid: {key} = {toml_value(none)}",
            )
    if OPTIMIZERS[recipe.optim.name].needs != "elements":
        yield (
            {"sync.method", "optim.name"},
            f'{method} is not supported with optim.name = "{recipe.optim.name}": servers keep rows, and its update '
            'needs whole matrices. Nearest valid: optim.name = "adamw"',
        )
    for name, none in (("noise_scale", "false"), ("memory_step", "0")):
        if getattr(recipe.observe, name):
            yield (
                {"sync.method", f"observe.{name}"},
                f"observe.{name} is not measured with {method}. Nearest valid: observe.{name} = {none}",
            )
