"""From a recipe to the part of the model that one rank computes. The order is fixed here, and only here:

1. cut the model into pipeline stages and keep this rank's (on "meta": no memory yet);
2. divide experts, tensors and the sequence: parameters become this rank's parts, collectives go in between;
3. recompute activations; 4. compile; 5. share states and sum gradients over the data axes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fivefold.models import LanguageModel
from fivefold.models.init import init_part
from fivefold.parallel import context, expert, recompute, tensor
from fivefold.parallel.data import DataParallel
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.pipeline import Pipeline
from fivefold.parallel.replica import Replica
from fivefold.parallel.stages import share_tied, split, sum_tied
from fivefold.recipe import Recipe
from fivefold.sharding import Part, held


@dataclass
class Parallel:
    """What a rank computes and keeps.

    stages: the model, or this rank's pipeline stages of it. positions: (T) of the tokens this rank gets; None: all.
    reductions: sums of gradients besides those of the replicas, called when these have finished. pipeline: what runs
    the stages, where there is more than one rank of them. balance: of the experts' load, where there are experts.
    """

    stages: list[nn.Module]
    replicas: list[Replica]
    positions: Tensor | None = None
    reductions: list[Callable[[], None]] = field(default_factory=list)
    pipeline: Pipeline | None = None
    balance: expert.Balance | None = None


def parallelize(
    recipe: Recipe,
    mesh: Mesh,
    compute_dtype: torch.dtype,
    reduce: torch.dtype,
    memory: AbstractContextManager[object] | None = None,
) -> Parallel:
    """Builds this rank's part of a resolved recipe's model, with its initial weights.

    memory: entered where the module gets memory; what comes before is done on "meta".
    """
    layout, model = mesh.layout, recipe.model
    numbered = split(model, layout, mesh.index("pp"))
    stages = list(numbered.values())
    table = held(model, layout, mesh.rank)
    found = Parallel(list(stages), [])
    if model.arch == "moe":
        found.balance = expert.Balance(stages, mesh, model)
        for stage in stages:
            expert.apply(stage, mesh, table)
    if mesh.size("tp") > 1:
        partial = [name for stage in stages for name in tensor.apply(stage, mesh, model, layout.sp)]
        found.reductions.append(tensor.sum_gradients(found.replicas, partial, mesh))
    if mesh.size("cp") > 1:
        found.positions = context.positions(model.seq_len, mesh)
        for stage in stages:
            context.apply(stage, mesh)
    if mesh.size("pp") > 1:
        found.pipeline = Pipeline(numbered, mesh, model.dim, compute_dtype)
    for stage in stages:
        recompute.apply(stage, layout.recompute)
    if mesh.device.type == "cuda" and not (found.pipeline and found.pipeline.splits_backward):
        for stage in stages:
            mixed = {
                number for number, _ in expert.mixtures(stage)
            }  # the compiler would break at every choice
            for number, block in stage.blocks.items():
                if int(number) not in mixed:
                    block.compile()
    if layout.zero and mesh.size("shard") > 1:
        from fivefold.parallel import zero  # here: importing FSDP2 takes half a second

        for stage in stages:  # before it has memory: no rank ever holds all the weights in fp32
            zero.shard(stage, mesh, compute_dtype, reduce)
    with memory or nullcontext():
        for stage in stages:
            materialize(stage, recipe, table, mesh.device)
        of_stage = _add_replicas(found, numbered, mesh, table, compute_dtype, reduce)
    if found.pipeline is not None:
        found.pipeline.replicas = of_stage
        if model.tie_embeddings:
            found.reductions += sum_tied(found.replicas, mesh, found.pipeline.rank_of)
    return found


def _add_replicas(
    found: Parallel,
    numbered: dict[int, LanguageModel],
    mesh: Mesh,
    table: dict[str, Part],
    compute_dtype: torch.dtype,
    reduce: torch.dtype,
) -> dict[int, list[Replica]]:
    """Gives the parameters of stages that have memory to replicas. Returns those of each stage, by its number."""
    layout, stages = mesh.layout, list(numbered.values())
    of_stage: dict[int, list[Replica]] = {}
    sharded = layout.zero and mesh.size("shard") > 1
    for group in [stages] if share_tied(numbered) else [[stage] for stage in stages]:
        params = {name: p for stage in group for name, p in stage.named_parameters()}
        experts = {name: params.pop(name) for name in list(params) if layout.ep > 1 and table[name].expert}
        replicas: list[Replica]
        if sharded:
            from fivefold.parallel import zero

            replicas = [zero.Sharded(group, table, layout.zero, mesh.size("pp") > 1)]
        else:
            replicas = [DataParallel(params, table, compute_dtype, mesh.group("batch"), reduce)]
        if experts and (not sharded or mesh.size("eshard") == 1):  # on fewer ranks than the rest, or none
            replicas.append(DataParallel(experts, table, compute_dtype, mesh.group("edp"), reduce))
        found.replicas += replicas
        of_stage |= {number: replicas for number, stage in numbered.items() if stage in group}
    return of_stage


def materialize(stage: nn.Module, recipe: Recipe, table: dict[str, Part], device: torch.device) -> None:
    """Gives a module that is on "meta" memory on the device, and its initial weights."""
    stage.to_empty(device=device)
    with torch.no_grad():
        for buffer in stage.buffers():
            buffer.zero_()
        for name, parameter in stage.named_parameters():
            own = getattr(parameter, "to_local", lambda whole=parameter: whole)()  # a DTensor's rows
            own.copy_(init_part(recipe.train.seed, name, recipe.model, table[name], device))
