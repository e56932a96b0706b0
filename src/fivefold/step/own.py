"""A user's own module: what it does not train with, and the same weights on every rank."""

from __future__ import annotations

import torch
from torch import nn

from fivefold.checkpoint.store import odd_numbers
from fivefold.errors import UserError
from fivefold.models.own import ModuleCard, OwnModel, buffers_of, refuse
from fivefold.models.recomputation import budget_of
from fivefold.optim import OPTIMIZERS
from fivefold.parallel import products
from fivefold.parallel.mesh import Mesh
from fivefold.precision.fp8 import FP8
from fivefold.recipe import Recipe
from fivefold.spread.layout import Layout
from fivefold.spread.tiers import OFFLOADS, partitions


def own_model(recipe: Recipe, module: nn.Module, card: ModuleCard | None = None) -> OwnModel:
    """The module as data.

    Raises:
        UserError: it does not train with this recipe and layout. The message says what to change.
    """
    own, layout = (
        OwnModel(module, card, recipe.model.freeze),
        Layout.from_recipe(recipe.layout),
    )
    name = type(module).__name__
    if recipe.servers.count:
        raise UserError(
            'a module of your own does not train with sync.method = "server". Use sync.method = "all"'
        )
    if products.wanted(recipe) is not None:
        raise UserError(f'custom modules do not train in {FP8}. Use precision.mode = "bf16" or "auto"')
    if OFFLOADS[layout.offload].streams:
        raise UserError(
            f'layout.offload = "{layout.offload}": custom modules keep their states on the device. Nearest valid: '
            '"activations"'
        )
    if partitions(layout.offload, layout.recompute, layout.tp, layout.sp):
        raise UserError(
            f'layout.offload = "{layout.offload}": of a custom module, tp does not divide the inputs of recomputed '
            'blocks. Nearest valid: offload = "none", or recompute = "none"'
        )
    if budget_of(layout.recompute) is not None:
        raise UserError(
            f'layout.recompute = "{layout.recompute}": the planner does not know {name}. Nearest valid: recompute=full'
        )
    refuse(own, layout, card is not None)
    for where, buffer in buffers_of(module)[0].items():
        if why := odd_numbers(buffer, buffer=True):
            raise UserError(
                f"{name}: the buffer {where} {why}, which no checkpoint holds. Register it with persistent=False"
            )
    optimizer = OPTIMIZERS[recipe.optim.name]
    if not any(optimizer.of(n, shape) is optimizer for n, shape in own.parameters.items()):
        raise UserError(
            f'optim.name = "{recipe.optim.name}" updates the matrices of "blocks.N...", and leaves all others to '
            f"{optimizer.rest.name if optimizer.rest else 'none'}. This module has no such names. Rename them, or use "
            "adamw"
        )
    if card is not None and own.stack == "blocks" and own.blocks != recipe.model.layers and layout.pp > 1:
        raise UserError(
            f"model.layers = {recipe.model.layers}, and {name} has {own.blocks} blocks. Set model.layers={own.blocks}: "
            "the rules of layouts read it"
        )
    return own


@torch.no_grad()
def make_equal(module: nn.Module, mesh: Mesh) -> None:
    """Broadcasts rank 0's weights and buffers: a module may have been initialised differently on each rank."""
    run = mesh.axis("run")
    if run.size > 1:
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.numel():
                run.broadcast(tensor.data, 0)
