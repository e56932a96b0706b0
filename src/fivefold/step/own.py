"""A user's own module: what it does not train with, and the same weights on every rank."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fivefold.checkpoint.store import odd_numbers
from fivefold.data import Batch
from fivefold.errors import UserError
from fivefold.host.memory import available
from fivefold.kernels.documents import Documents
from fivefold.models.own import ModuleCard, OwnModel, buffers_of, refuse
from fivefold.models.recomputation import budget_of
from fivefold.optim import OPTIMIZERS
from fivefold.parallel import products
from fivefold.parallel.mesh import Mesh
from fivefold.recipe import Recipe, TrainSection
from fivefold.spread.layout import Layout
from fivefold.spread.tiers import OFFLOADS, partitions
from fivefold.step.brought import called


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
        raise UserError(
            f'custom modules do not train in {recipe.precision.mode}. Use precision.mode = "bf16" or "auto"'
        )
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


def try_out(module: nn.Module, batches: Any, train: TrainSection) -> None:
    """Forward and backward of a copy on the first two microbatches, so that what is wrong with a module is said before
    anything is made of the run. Nothing is tried where it cannot be copied, or where memory is too short for that.

    Raises:
        UserError: it fails, or does not return a loss. The message has the user's own line.
    """
    name, room, B = type(module).__name__, available(), train.microbatch_size or 1
    if room is not None and 3 * sum(p.nbytes for p in module.parameters()) > room:
        return
    try:
        copied = deepcopy(module).train()
    except Exception:  # whatever the user's own classes raise
        return
    with torch.random.fork_rng():
        for row in range(0, train.global_batch_size, B)[:2]:
            found = Batch(*batches.batch(0, range(row, row + B)))
            inputs, targets = (torch.as_tensor(x).long() for x in (found.inputs, found.targets))
            first = (
                {}
                if found.first is None
                else {"documents": Documents(np.asarray(found.first), inputs.device)}
            )
            said = f"{name}(inputs, targets) with tokens {inputs.min()} to {inputs.max()} of shape {(*inputs.shape,)}"
            loss = called(said, partial(copied, inputs, targets, **first))
            if not isinstance(loss, Tensor) or loss.dim():
                given = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
                raise UserError(
                    f"{name}(inputs, targets) = {given:.60}: must be the mean loss, a scalar tensor"
                )
            called(f"backward of the loss of {name}", loss.backward)


@torch.no_grad()
def make_equal(module: nn.Module, mesh: Mesh) -> None:
    """Broadcasts rank 0's weights and buffers: a module may have been initialised differently on each rank."""
    run = mesh.axis("run")
    if run.size > 1:
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.numel():
                run.broadcast(tensor.data, 0)
