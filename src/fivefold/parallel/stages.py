"""Cutting a model into pipeline stages, and what the first and the last of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from fivefold.layout import Layout
from fivefold.models import LanguageModel, build
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.replica import Replica
from fivefold.recipe.schema import ModelSection
from fivefold.sharding import TIED, stage_parameters, stages_of


def split(model: ModelSection, layout: Layout, pp_index: int) -> dict[int, LanguageModel]:
    """The stages of the ranks with this index on the pp axis, by number, on "meta". Without a pipeline: {0: the whole
    model}. Parameters keep the names that they have in the whole."""
    names = stage_parameters(model, layout)
    found = {}
    for stage in stages_of(layout, pp_index):
        module = build(model, device="meta")
        assert isinstance(module, LanguageModel)
        _keep(module, set(names[stage]))
        module.first, module.last = stage == 0, stage == len(names) - 1
        found[stage] = module
    return found


def _keep(module: LanguageModel, names: set[str]) -> None:
    """Drops every block, and every other parameter or layer of the model, of which no parameter is in `names`."""
    for number in list(module.blocks):
        if not _any(names, f"blocks.{number}"):
            del module.blocks[number]
    for name, child in list(module.named_children()):
        if name != "blocks" and any(True for _ in child.parameters()) and not _any(names, name):
            setattr(module, name, None)
    for name, _ in list(module.named_parameters(recurse=False)):
        if name not in names:
            setattr(module, name, None)


def _any(names: set[str], module: str) -> bool:
    return any(name.startswith(f"{module}.") for name in names)


def share_tied(stages: Mapping[int, LanguageModel]) -> bool:
    """Where a rank has the first and the last stage of a model with tied embeddings (schedules that turn around), lets
    both compute with one tensor. Returns whether that is so here. For stages that have memory. Where FSDP2 has divided
    the weights, `zero.Sharded` does it."""
    first, last = (next((s for s in stages.values() if getattr(s, end)), None) for end in ("first", "last"))
    if first is None or last is None or first is last or TIED not in dict(last.named_parameters()):
        return False
    if not hasattr(first.get_parameter(TIED), "to_local"):
        owner, _, leaf = TIED.rpartition(".")
        setattr(last.get_submodule(owner), leaf, first.get_parameter(TIED))
    return True


def sum_tied(replicas: Sequence[Replica], mesh: Mesh, rank_of: Sequence[int]) -> list[Callable[[], None]]:
    """The reduction that adds up the gradients of a tied embedding on the first and the last stage, where these are on
    different ranks: each sends its own and adds the other's, so both hold the same bits."""
    first, last = rank_of[0], rank_of[-1]
    if first == last or mesh.index("pp") not in (first, last):
        return []
    other = mesh.ranks("pp")[last if mesh.index("pp") == first else first]

    def reduction() -> None:
        for replica in replicas:
            if TIED in replica.gradients:
                mine = replica.gradients[TIED]
                theirs = torch.empty_like(mine)
                group = mesh.group("pp")
                transfers = [
                    dist.P2POp(dist.isend, mine.contiguous(), other, group),
                    dist.P2POp(dist.irecv, theirs, other, group),
                ]
                for work in dist.batch_isend_irecv(transfers):
                    work.wait()
                mine.add_(theirs)

    return [reduction]
