"""What changes while training, on one rank: its part of the model, of the master weights and of the optimizer."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.errors import UserError
from fivefold.host import memory_bytes
from fivefold.layout import Layout
from fivefold.observe.machine import has_fast_bf16
from fivefold.optim import build_adamw
from fivefold.parallel.data import DataParallel
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.parallelize import Parallel, parallelize
from fivefold.parallel.ranks import Ranks
from fivefold.parallel.replica import assert_owned_once
from fivefold.recipe import OptimSection, Recipe, count_parameters
from fivefold.sharding import Part, held, size_of, whole

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class State:
    """What changes while training; `step` counts the optimizer steps done."""

    parallel: Parallel
    mesh: Mesh
    optimizer: torch.optim.Optimizer
    step: int = 0
    updates: int = 0  # steps that changed the weights: those with a finite gradient
    skipped: int = 0  # steps skipped in a row
    noise: tuple[float, float] = (0.0, 0.0)  # averages that the noise scale is the ratio of (train/noise.py)

    @property
    def module(self) -> nn.Module:
        """The model where this rank computes all of its blocks."""
        assert len(self.parallel.stages) == 1
        return self.parallel.stages[0]

    def masters(self) -> dict[str, Tensor]:
        """This rank's part of the weights in fp32, by name."""
        return {name: w for replica in self.parallel.replicas for name, w in replica.masters.items()}

    def gradients(self) -> dict[str, Tensor]:
        """Their gradients, after a step's backward."""
        return {name: g for replica in self.parallel.replicas for name, g in replica.gradients.items()}


def build_state(recipe: Recipe, ranks: Ranks, module: nn.Module | None = None) -> State:
    """Model, master weights and optimizer of a resolved recipe, at step 0: this rank's part of them."""
    if module is None and ranks.device.type == "cpu":
        _fits(recipe, Layout.from_recipe(recipe.layout), ranks)
    state = assemble(recipe, ranks, module)
    if module is None:
        assert_owned_once(state.parallel.replicas, state.mesh, count_parameters(recipe.model))
    return state


def assemble(
    recipe: Recipe,
    ranks: Ranks,
    module: nn.Module | None = None,
    memory: AbstractContextManager[object] | None = None,
) -> State:
    """`build_state` without its checks. memory: see `parallelize`."""
    mesh = Mesh(Layout.from_recipe(recipe.layout), ranks)
    dtype = DTYPES[compute_mode(recipe, ranks.device, module is not None)]
    reduce = DTYPES[recipe.precision.reduce]
    if module is None:
        parallel = parallelize(recipe, mesh, dtype, reduce, memory)
    else:
        parallel = _replicated(module, mesh, dtype, reduce)
    return with_optimizer(parallel, mesh, recipe.optim)


def with_optimizer(parallel: Parallel, mesh: Mesh, optim: OptimSection) -> State:
    """The state at step 0, ready to train."""
    for stage in parallel.stages:
        stage.train()
    masters = {name: w for replica in parallel.replicas for name, w in replica.masters.items()}
    optimizer = build_adamw(masters, optim.lr, optim.betas, optim.eps, optim.weight_decay)
    return State(parallel, mesh, optimizer)


def _fits(recipe: Recipe, layout: Layout, ranks: Ranks) -> None:
    """Refuses a model whose states alone are larger than the machine."""
    kept = sum(size_of(part.keeps) for part in held(recipe.model, layout, ranks.rank).values())
    needed = 16 * kept  # fp32: weight, gradient, two moments
    if needed * ranks.local_world > memory_bytes():
        raise UserError(
            f"the model needs at least {needed / 2**30:,.1f} GiB a rank (16 bytes a parameter) for {ranks.local_world} "
            f"rank(s), and this machine has {memory_bytes() / 2**30:,.1f} GiB"
        )


def _replicated(module: nn.Module, mesh: Mesh, dtype: torch.dtype, reduce: torch.dtype) -> Parallel:
    """A user's own module, whole on every rank.

    Raises:
        UserError: it has frozen parameters, or the layout divides it.
    """
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    if frozen:
        raise UserError(
            f"the module has frozen parameters ({', '.join(frozen[:3])}): this version trains all or none"
        )
    if mesh.layout.divided:
        raise UserError(
            "a module of your own trains on replicas only: nobody knows how to divide it. Use --layout dp=N"
        )
    module = module.float().to(mesh.device)
    if mesh.device.type == "cuda":
        module.compile()
    params = dict(module.named_parameters())
    spans = {name: whole(tuple(p.shape)) for name, p in params.items()}
    parts = {n: Part(tuple(p.shape), spans[n], spans[n], mesh.index("batch") == 0) for n, p in params.items()}
    return Parallel([module], [DataParallel(params, parts, dtype, mesh.group("batch"), reduce)])


def compute_mode(recipe: Recipe, device: torch.device, own_module: bool = False) -> str:
    """ "fp32" or "bf16": the recipe's, or where it says auto what is fast on the device. A user's own module runs in
    bf16 only when the recipe says so: nobody knows whether its buffers would follow."""
    if recipe.precision.mode != "auto":
        return recipe.precision.mode
    if own_module:
        return "fp32"
    return "bf16" if has_fast_bf16(device.type) else "fp32"


def make_equal(state: State) -> None:
    """Gives every rank rank 0's weights: a user's own module may have been initialised anew on each."""
    for replica in state.parallel.replicas:
        for weight in replica.masters.values():
            dist.broadcast(weight, 0)
        replica.refresh()
