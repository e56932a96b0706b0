"""Cuts a model into pipeline stages, and sums the gradients that the first and the last share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fivefold.models.base import LanguageModel
from fivefold.models.card import card_of
from fivefold.models.init import build
from fivefold.models.section import ModelSection
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.replica import Replica
from fivefold.spread.layout import Layout
from fivefold.spread.parts import TIED, stage_blocks, stage_parameters, stages_of


def split(model: ModelSection, layout: Layout, pp_index: int) -> dict[int, LanguageModel]:
    """The stages of the ranks with this index on the pp axis, by number, on "meta". Without a pipeline: {0: the whole
    model}. Parameters keep their names."""
    card = card_of(model)
    names = stage_parameters(card, stage_blocks(card, layout))
    found = {}
    for stage in stages_of(layout, pp_index):
        module = build(model, device="meta")
        assert isinstance(module, LanguageModel)
        keep(module, set(names[stage]))
        module.first, module.last = stage == 0, stage == len(names) - 1
        found[stage] = module
    return found


def keep(module: LanguageModel, names: set[str]) -> None:
    """Drops each block, layer and parameter that has nothing in `names`."""
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


def sum_tied(replicas: Sequence[Replica], mesh: Mesh, rank_of: Sequence[int]) -> list[Callable[[], None]]:
    """Returns a reduction that sums the gradients of a tied embedding, if its first and last stage are on different
    ranks. Each rank sends its gradient and adds the other's, so both hold the same bits."""
    first, last = rank_of[0], rank_of[-1]
    if first == last or mesh.index("pp") not in (first, last):
        return []
    other = last if mesh.index("pp") == first else first

    def reduction() -> None:
        for replica in replicas:
            if TIED in replica.gradients:
                gradient = replica.gradients[TIED]
                mine = gradient.to(mesh.device).contiguous()  # NCCL sends nothing from host memory
                theirs = torch.empty_like(mine)
                mesh.axis("pp").start_exchange(mine, other, theirs, other)()
                gradient.add_(theirs.to(gradient.device))

    return [reduction]
