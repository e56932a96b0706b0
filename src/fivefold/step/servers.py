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
from fivefold.optim.updater import Updater
from fivefold.parallel.data import DataParallel
from fivefold.parallel.link import Link
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.parallelize import Parallel, parallelize
from fivefold.parallel.replica import assert_owned_once
from fivefold.parallel.server import Shard
from fivefold.parallel.worker import Exchange
from fivefold.precision import torch_dtype
from fivefold.recipe import Recipe, count_parameters
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import parts
from fivefold.sharding.sync import messages, units
from fivefold.step.state import State, compute_mode, updater_arguments


def server_state(recipe: Recipe, ranks: Ranks) -> tuple[State, list[Shard]]:
    """A server's state at step 0, and its rows of each unit. The servers save and resume as ranks of ZeRO 1 do.

    ranks: of the run. The first are the servers."""
    servers, card = recipe.servers, card_of(recipe.model)
    mesh = Mesh(servers.layout, replace(ranks, world=servers.count))
    table = parts(card, servers.layout, ranks.rank)
    arguments = updater_arguments(recipe, {name: part.shape for name, part in table.items()})
    shards = [
        Shard(
            message,
            table,
            lambda name: init_part(recipe.train.seed, name, recipe.model, table[name]),
            ranks.world - servers.count,
            torch_dtype(recipe.precision.reduce),
            torch_dtype(compute_mode(recipe, ranks.device).working),
            servers.synchronous,
            lambda masters: Updater(masters=masters, **arguments),
        )
        for message in messages(card, servers)
        if message.server == ranks.rank
    ]
    assert_owned_once(shards, mesh, count_parameters(recipe.model))
    return State(Parallel([], [*shards]), mesh, torch.zeros(2, dtype=torch.float64)), shards


def worker_state(recipe: Recipe, ranks: Ranks, links: list[Link]) -> tuple[State, Exchange]:
    """A worker's state, whose weights come from the servers, and what takes its gradients there."""
    servers, worker = recipe.servers, ranks.rank - recipe.servers.count
    mesh = Mesh(
        replace(Layout.from_recipe(recipe.layout), dp_replicate=1), replace(ranks, rank=worker, world=1)
    )
    model_of_one_rank = recipe.model_copy(
        update={"layout": recipe.layout.model_copy(update={"dp_replicate": 1})}
    )
    working = torch_dtype(compute_mode(recipe, ranks.device).working)
    parallel = parallelize(model_of_one_rank, mesh, working, torch.float32)
    replica, card = parallel.replicas[0], card_of(recipe.model)
    module = cast("LanguageModel", parallel.stages[0])
    assert isinstance(replica, DataParallel)
    replica.only_working()
    pushed = torch_dtype(recipe.precision.reduce)
    exchange = Exchange(messages(card, servers), units(card), module, replica, links, servers, pushed)
    replica.sum = exchange
    module.train()
    return State(parallel, mesh, torch.zeros(2, dtype=torch.float64)), exchange


def assert_possible(ranks: Ranks) -> None:
    """Raises UserError for what parameter servers do not support."""
    if ranks.device.type != "cpu":
        raise UserError(
            'sync.method = "server" runs on CPUs only in this version: no messages between GPUs and servers have been '
            'tried. Put CUDA_VISIBLE_DEVICES= (with no value) before the command, or set sync.method = "all"'
        )
