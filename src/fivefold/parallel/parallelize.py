"""From a recipe to the part of the model that one rank computes. The order is fixed here, and only here:

1. cut the model into pipeline stages and keep this rank's (on "meta": no memory yet);
2. divide experts, tensors and the sequence: parameters become this rank's parts, collectives go in between;
3. recompute activations; 4. compile; 5. share states and sum gradients over the data axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fivefold.models import LanguageModel, build
from fivefold.models.init import init_part
from fivefold.parallel import recompute, tensor
from fivefold.parallel.data import DataParallel
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.replica import Replica
from fivefold.recipe import Recipe
from fivefold.sharding import Part, parts


@dataclass
class Parallel:
    """What a rank computes and keeps.

    stages: the model, or this rank's pipeline stages of it. positions: (T) of the tokens this rank gets; None: all.
    reductions: sums of gradients besides those of the replicas, called when these have finished.
    """

    stages: list[nn.Module]
    replicas: list[Replica]
    positions: Tensor | None = None
    reductions: list[Callable[[], None]] = field(default_factory=list)


def parallelize(recipe: Recipe, mesh: Mesh, compute_dtype: torch.dtype, reduce: torch.dtype) -> Parallel:
    """Builds this rank's part of a resolved recipe's model, with its initial weights."""
    layout, model = mesh.layout, recipe.model
    module = build(model, device="meta")
    assert isinstance(module, LanguageModel)
    stages: list[LanguageModel] = [module]
    table = parts(model, layout, mesh.rank)
    found = Parallel(list(stages), [])
    if mesh.size("tp") > 1:
        partial = [name for stage in stages for name in tensor.apply(stage, mesh, model, layout.sp)]
        found.reductions.append(tensor.sum_gradients(found.replicas, partial, mesh))
    for stage in stages:
        recompute.apply(stage, layout.recompute)
    if mesh.device.type == "cuda":
        for stage in stages:
            for block in stage.blocks.values():
                block.compile()
    shared = layout.zero > 0 and mesh.size("shard") > 1
    if shared:
        from fivefold.parallel import zero  # here: importing FSDP2 takes half a second

        for stage in stages:  # before it has memory: no rank ever holds all the weights in fp32
            zero.shard(stage, mesh, compute_dtype, reduce)
    for stage in stages:
        materialize(stage, recipe, table, mesh.device)
    if shared:
        found.replicas.append(zero.Sharded(stages, table, layout.zero))
    else:
        params = {name: p for stage in stages for name, p in stage.named_parameters()}
        found.replicas.append(DataParallel(params, table, compute_dtype, mesh.group("batch"), reduce))
    return found


def materialize(stage: nn.Module, recipe: Recipe, table: dict[str, Part], device: torch.device) -> None:
    """Gives a module that is on "meta" memory on the device, and its initial weights."""
    stage.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            own = getattr(parameter, "to_local", lambda whole=parameter: whole)()  # a DTensor's rows
            own.copy_(init_part(recipe.train.seed, name, recipe.model, table[name], device))
