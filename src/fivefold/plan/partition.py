"""Cuts a model into pipeline stages, and builds the schedule that runs them."""

from __future__ import annotations

import math
from functools import lru_cache

from fivefold.models.card import card_of
from fivefold.models.section import ModelSection
from fivefold.plan.software import Partition
from fivefold.schedules.pipeline import DEFAULT, Schedule, build, stages_per_rank
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import stage_blocks


@lru_cache(maxsize=256)
def schedule(name: str, ranks: int, microbatches: int, virtual_stages: int) -> Schedule:
    return build(name, ranks, microbatches, virtual_stages)


def stages(model: ModelSection, layout: Layout, how: Partition = "balanced") -> tuple[range, ...]:
    """The blocks of each stage, cut as the trainer does or as other programs do (see `software.Partition`)."""
    name = layout.schedule if layout.pp > 1 else DEFAULT
    return _stages_of(model, layout.pp, name, layout.virtual_stages, how)


@lru_cache(maxsize=4096)
def _stages_of(
    model: ModelSection, pp: int, name: str, virtual_stages: int, how: Partition
) -> tuple[range, ...]:
    if how == "balanced":
        return stage_blocks(card_of(model), Layout(pp=pp, schedule=name, virtual_stages=virtual_stages))
    count = pp * stages_per_rank(name, virtual_stages) if pp > 1 else 1
    if how == "even":
        each = model.layers / count
        return tuple(range(round(i * each), round((i + 1) * each)) for i in range(count))
    return _greedy(model, count)


def _greedy(model: ModelSection, stages: int) -> tuple[range, ...]:
    """Fills stages in order, each until it exceeds its share of the matmul weights, output layer included."""
    layer = sum(
        math.prod(s) for n, s in card_of(model).parameters.items() if n.startswith("blocks.0.") and len(s) > 1
    )
    total = layer * model.layers + (model.vocab_size or 0) * model.dim
    found, start = [], 0
    for stage in range(stages - 1):
        stop = min(model.layers, math.floor(total * (stage + 1) / stages / layer) + 1)
        found.append(range(start, max(start, stop)))
        start = max(start, stop)
    return (*found, range(start, model.layers))
