"""The states of a run with parameter servers: a server's rows, and a worker's model."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from fivefold.errors import UserError
from fivefold.launch.ranks import Ranks
from fivefold.models.base import LanguageModel
from fivefold.models.card import card_of
from fivefold.models.init import init_part
from fivefold.optim import OPTIMIZERS
from fivefold.optim.updater import Updater
from fivefold.parallel.data import DataParallel
from fivefold.parallel.link import Link
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.parallelize import Parallel, parallelize
from fivefold.parallel.replica import Replica, assert_owned_once
from fivefold.parallel.server import Shard
from fivefold.parallel.worker import Served
from fivefold.precision import torch_dtype
from fivefold.recipe import Recipe, count_parameters, targets_per_step
from fivefold.spread.layout import Layout
from fivefold.spread.parts import parts
from fivefold.spread.servers import messages, units
from fivefold.step.state import State, compute_mode, decay_of, optimizer_fields, rate_of


def server_state(recipe: Recipe, ranks: Ranks) -> tuple[State, list[Shard]]:
    """A server's state at step 0, and its rows of each unit. The servers save and resume as ranks of ZeRO 1 do.

    ranks: of the run. The first are the servers."""
    servers = recipe.servers
    mesh = Mesh(servers.layout, replace(ranks, world=servers.count))
    table = parts(card_of(recipe.model), servers.layout, ranks.rank)
    card, optim = OPTIMIZERS[recipe.optim.name], recipe.optim
    fields = optimizer_fields(optim)
    pushed = torch_dtype(recipe.precision.reduce)
    pulled = torch_dtype(compute_mode(recipe, ranks.device).working)
    shards = [
        Shard(
            message,
            table,
            lambda name: init_part(recipe.train.seed, name, recipe.model, table[name]),
            ranks.world - servers.count,
            pushed,
            pulled,
            servers.synchronous,
            lambda masters: Updater(
                card,
                masters,
                optim.lr,
                {name: decay_of(optim, name) for name in masters},
                fields,
                {name: rate_of(optim, name, table[name].shape) for name in masters},
                tokens=targets_per_step(recipe),
            ),
        )
        for message in messages(card_of(recipe.model), servers)
        if message.server == ranks.rank
    ]
    kept = cast("list[Replica]", shards)  # a server computes no gradients
    assert_owned_once(kept, mesh, count_parameters(recipe.model))
    return State(Parallel([], kept), mesh, torch.zeros(2, dtype=torch.float64)), shards


def worker_state(recipe: Recipe, ranks: Ranks, links: list[Link]) -> tuple[State, Served]:
    """A worker's state, whose weights come from the servers."""
    servers, worker = recipe.servers, ranks.rank - recipe.servers.count
    alone = replace(Layout.from_recipe(recipe.layout), dp_replicate=1)
    mesh = Mesh(alone, replace(ranks, rank=worker, world=1))
    own = recipe.model_copy(
        update={"layout": recipe.layout.model_copy(update={"dp_replicate": 1})}
    )  # the model of one rank
    parallel = parallelize(own, mesh, torch_dtype(compute_mode(recipe, ranks.device).working), torch.float32)
    (module,), (replica,) = parallel.stages, parallel.replicas
    assert isinstance(replica, DataParallel)
    card = card_of(recipe.model)
    served = Served(
        replica,
        cast("LanguageModel", module),
        units(card),
        messages(card, servers),
        links,
        servers,
        torch_dtype(recipe.precision.reduce),
    )
    parallel.replicas[0] = served
    module.train()
    return State(parallel, mesh, torch.zeros(2, dtype=torch.float64)), served


def assert_possible(ranks: Ranks, own_module: bool) -> None:
    """Raises UserError for what parameter servers do not support."""
    if ranks.device.type != "cpu":
        raise UserError(
            'sync.method = "server" runs on CPUs only in this version: no messages between GPUs and servers have been '
            'tried. Put CUDA_VISIBLE_DEVICES= (with no value) before the command, or set sync.method = "all"'
        )
    if own_module:
        raise UserError(
            'a module of your own does not train with sync.method = "server". Use sync.method = "all"'
        )
