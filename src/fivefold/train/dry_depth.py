"""A dry run of a deep model from small ones: what is counted grows by the same amount with each block of every stage,
and with each microbatch, once there are some. Two depths and two numbers of microbatches are traced, and the line
through them is followed; where the whole is small enough, it is traced itself.

What does not follow a line: how many messages the gradients are cut into at ZeRO stage 0, since a slice ends behind
the parameter that fills it (their bytes do); and a peak that is at another moment in the small model than in the large.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fivefold.errors import UserError
from fivefold.layout import Layout, to_text, validate
from fivefold.observe.tracking import CATEGORIES, Peak
from fivefold.recipe import Recipe, flops_per_token, tokens_per_step
from fivefold.recipe.schema import ModelSection
from fivefold.schedules.pipeline import stages_a_rank
from fivefold.sharding import stage_blocks, stages_of
from fivefold.train.dry_run import Traced, trace

AS_IT_IS = 256  # blocks times microbatches that are traced: about ten seconds
LEAST_BLOCKS = 4  # of a stage, in a small model

Figures = Mapping[str, int]


@dataclass(frozen=True)
class DryRun:
    """What a rank of a layout has and sends in a step.

    traced: (layers, microbatches) of the models that ran; one if nothing is extrapolated. formula: FLOPs of a rank by
    the model's formula, without recomputation, the mean of all ranks.
    """

    layout: str
    rank: int
    step: Traced
    traced: list[tuple[int, int]]
    formula: float
    seconds: float

    @property
    def extrapolated(self) -> bool:
        return len(self.traced) > 1

    def as_json(self) -> dict[str, Any]:
        memory, sent = self.step.memory, self.step.sent
        return {
            "rank": self.rank,
            "memory": {"peak_bytes": memory.total, "at_peak": memory.at_peak, "highest": memory.highest},
            "communication": [
                {"operation": operation, "axis": axis, "calls": calls, "bytes": size}
                for (operation, axis), (calls, size) in sent.items()
            ],
            "flops": self.step.flops,
            "flops_formula": self.formula,
            "extrapolated": self.extrapolated,
            "traced": [{"layers": layers, "microbatches": count} for layers, count in self.traced],
            "seconds": self.seconds,
        }


def dry_run(recipe: Recipe, rank: int = 0) -> DryRun:
    """Traces a step of a resolved recipe on a rank of its layout.

    Raises:
        UserError: the layout is not valid, or has no such rank.
    """
    layout = Layout.from_recipe(recipe.layout)
    validate(layout, layout.ranks)
    if not 0 <= rank < layout.ranks:
        nearest = min(max(rank, 0), layout.ranks - 1)
        raise UserError(
            f"rank {rank}: layout '{to_text(layout)}' has {layout.ranks} ranks, 0 to {layout.ranks - 1}. "
            f"Nearest valid: {nearest}"
        )
    began, train = time.perf_counter(), recipe.train
    count = train.global_batch_size // (layout.dp * (train.microbatch_size or 1))
    layers, counts = sizes(recipe.model, layout, rank, count)
    steps = {(L, m): trace(_with_layers(recipe, L), rank, m) for L in layers for m in counts}
    formula = flops_per_token(recipe.model) * tokens_per_step(recipe) / layout.ranks
    step = extrapolate(steps, recipe.model.layers, count)
    return DryRun(to_text(layout), rank, step, list(steps), formula, time.perf_counter() - began)


def sizes(
    model: ModelSection, layout: Layout, rank: int, microbatches: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of layers and of microbatches to trace: one of each, or two where that is too much work."""
    position = layout.coordinates(rank)["pp"]
    layers, counts = (model.layers,), (microbatches,)
    work = sum(map(sum, _stages(model, layout, position))) * microbatches
    if work > AS_IT_IS:
        layers = depths(model, layout, position)
        work = sum(map(sum, _stages(_deep(model, layers[-1]), layout, position))) * microbatches
    if work > AS_IT_IS:
        counts = fewer(microbatches, layout)
    return layers, counts


def depths(model: ModelSection, layout: Layout, position: int) -> tuple[int, ...]:
    """Two small numbers of layers with which each stage of the ranks at this position of the pipeline has so many
    blocks less, the same number in all; or the model's own where there are none."""
    own = _stages(model, layout, position)
    everywhere = layout.pp * (stages_a_rank(layout.schedule, layout.virtual_stages) if layout.pp > 1 else 1)
    found: list[int] = []
    for less in range(min(map(sum, own)) - LEAST_BLOCKS, 0, -1):
        small = _deep(model, model.layers - less * everywhere)
        if _stages(small, layout, position) == [(dense, other - less) for dense, other in own]:
            found.append(small.layers)
        if len(found) == 2:
            return tuple(found)
    return (model.layers,)


def fewer(microbatches: int, layout: Layout) -> tuple[int, ...]:
    """Two small numbers of microbatches that fill the pipeline, and leave as many over as all of them do."""
    least = 2 * layout.pp * max(2, layout.virtual_stages) if layout.pp > 1 else 2
    first = least + (microbatches - least) % layout.pp
    return (first, first + layout.pp) if first + layout.pp < microbatches else (microbatches,)


def extrapolate(steps: Mapping[tuple[int, int], Traced], layers: int, microbatches: int) -> Traced:
    """The step at a depth and a number of microbatches, from those at two of each or one."""
    table = {size: _figures(step) for size, step in steps.items()}
    depths, counts = (sorted({size[i] for size in table}) for i in (0, 1))
    at_depth = {
        depth: _follow({count: table[depth, count] for count in counts}, microbatches) for depth in depths
    }
    return _traced(_follow(at_depth, layers))


def _follow(table: Mapping[int, Figures], x: int) -> Figures:
    """The line through two points, at x; one point is that of x."""
    if len(table) == 1:
        return next(iter(table.values()))
    (x1, first), (x2, second) = table.items()

    def at(name: str) -> int:
        y1, y2 = first.get(name, 0), second.get(name, 0)
        return y1 + (y2 - y1) * (x - x1) // (x2 - x1)

    return {name: at(name) for name in {**first, **second}}


def _figures(step: Traced) -> Figures:
    memory = step.memory
    found = {"flops": step.flops, "total": memory.total}
    found |= {f"at_peak {name}": memory.at_peak[name] for name in CATEGORIES}
    found |= {f"highest {name}": memory.highest[name] for name in CATEGORIES}
    for (operation, axis), (calls, size) in step.sent.items():
        found |= {f"calls {operation} {axis}": calls, f"bytes {operation} {axis}": size}
    return found


def _traced(figures: Figures) -> Traced:
    def memory(kind: str) -> dict[str, int]:
        return {name: figures[f"{kind} {name}"] for name in CATEGORIES}

    messages = sorted(tuple(name.split()[1:]) for name in figures if name.startswith("calls "))
    sent = {
        (operation, axis): (figures[f"calls {operation} {axis}"], figures[f"bytes {operation} {axis}"])
        for operation, axis in messages
    }
    return Traced(Peak(figures["total"], memory("at_peak"), memory("highest")), sent, figures["flops"])


def _stages(model: ModelSection, layout: Layout, position: int) -> list[tuple[int, int]]:
    """(dense blocks before the others, others) of each stage of the ranks at a position."""
    blocks = stage_blocks(model, layout)
    dense = model.dense_layers if model.arch == "moe" else 0
    found = []
    for stage in stages_of(layout, position):
        before = sum(number < dense for number in blocks[stage])
        found.append((before, len(blocks[stage]) - before))
    return found


def _deep(model: ModelSection, layers: int) -> ModelSection:
    return model.model_copy(update={"layers": layers})


def _with_layers(recipe: Recipe, layers: int) -> Recipe:
    return recipe.model_copy(update={"model": _deep(recipe.model, layers)})
