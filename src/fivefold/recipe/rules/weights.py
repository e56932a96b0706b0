"""Rules of weights that come from elsewhere, that stay as they are, or that have factors of their own."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from fivefold.errors import UserError
from fivefold.models.card import Contradiction
from fivefold.recipe.schema import Sections
from fivefold.schedules.compression import NONE
from fivefold.spread.names import groups, matching, patterns, unmatched
from fivefold.spread.tiers import NOT_OFFLOADED


def weights(recipe: Sections) -> Iterator[Contradiction]:
    frozen, train = recipe.model.freeze.strip(), recipe.train
    try:
        groups(recipe.optim.groups)
    except UserError as error:
        yield {"optim.groups"}, f"optim.groups: {error}"
    if train.init_from and recipe.servers.count:
        yield (
            {"train.init_from", "sync.method"},
            'train.init_from is not supported with sync.method = "server". Nearest valid: sync.method = "all"',
        )
    if not recipe.checkpoint.frozen and not train.init_from:
        yield (
            {"checkpoint.frozen", "train.init_from"},
            "checkpoint.frozen = false: frozen weights are then read from train.init_from, which is not set. Nearest "
            "valid: checkpoint.frozen = true",
        )
    without = {
        "layout.offload": (recipe.layout.offload != NOT_OFFLOADED, f'"{NOT_OFFLOADED}"'),
        "layout.zeropp": (recipe.layout.zeropp != NONE, f'"{NONE}"'),
        "sync.method": (recipe.sync.method != "all", '"all"'),
        "observe.noise_scale": (recipe.observe.noise_scale, "false"),
    }
    for key, (used, nearest) in without.items():
        if frozen and used:
            yield (
                {"model.freeze", key},
                f'model.freeze = "{frozen}" is not supported with {key}. Nearest valid: {key} = {nearest}',
            )


def wrong_patterns(recipe: Sections, names: Collection[str]) -> str:
    """What is wrong with the patterns of a recipe, given the names of all parameters; "" if nothing is."""
    freeze, some = recipe.model.freeze, recipe.optim.groups
    if wrong := unmatched("model.freeze", freeze, patterns(freeze), names):
        return wrong
    if freeze and len(matching(freeze, names)) == len(names):
        return f'model.freeze = "{freeze}": every parameter is frozen, so there is nothing to train'
    return unmatched("optim.groups", some, [group.pattern for group in groups(some)], names)
