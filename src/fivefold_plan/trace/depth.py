"""The exact figures of a rank: memory, messages, FLOPs and host syncs of its step, for a model of any size.

A small step is traced as it is. A large one is extrapolated from two depths and two numbers of microbatches: each block
of a stage adds the same amount, and so does each microbatch once the pipeline is full.

Two figures are not linear. The number of gradient messages at ZeRO stage 0 is not, since a bucket ends behind the
parameter that fills it (their bytes are linear). A peak is not, if it occurs at another moment in the small model:
tokens of many microbatches and their documents, which wait for their turn, can make it come earlier (0.2% of a tiny
model, interleaved).

Figures are kept in the cache folder, by everything they depend on: recipe, rank, and the code of Fivefold and PyTorch.
A missing, broken or unwritable file is not an error: the step is traced again. Last their text, beside a prediction.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import fivefold
from fivefold.errors import UserError
from fivefold.files import cache_folder, writable, write_atomically
from fivefold.host.devices import GIB
from fivefold.host.machine import has_cpu_bf16, has_cpu_fp16
from fivefold.kernels import native
from fivefold.launch.ranks import threads_of
from fivefold.models.card import card_of
from fivefold.models.section import ModelSection
from fivefold.recipe import Recipe, flops_per_token, microbatches_per_step
from fivefold.schedules.pipeline import FILLING
from fivefold.schedules.timelines import AWAY, CATEGORIES, MemoryTimeline
from fivefold.sharding.layout import Layout, to_text
from fivefold.sharding.layout_rules import validate
from fivefold.sharding.parts import stage_blocks, stages_of
from fivefold.sharding.sync import in_replica_group, replica_group_layout
from fivefold.sharding.tiers import BEHIND, OFFLOADS
from fivefold.step.state import compute_mode
from fivefold_plan.predict import Plan
from fivefold_plan.trace.blocks import Block, Blocks, kinds
from fivefold_plan.trace.fake import CPU
from fivefold_plan.trace.memory import Peak
from fivefold_plan.trace.step import Traced, probe, trace

AS_IT_IS = 128  # blocks times microbatches that are traced without extrapolation: about three seconds
DRAWN = 1024  # the same, of a picture over time, which cannot be extrapolated: half a minute
LEAST_BLOCKS = 2  # of a stage in a small model
LEAST_SHARDED = 3  # the same under ZeRO, which may hold the weights of three blocks at once
# If gradients leave unit by unit, beside a window of weights: as many are there at once
LEAST_MOVED = 2 + BEHIND


@dataclass(frozen=True)
class Exact:
    """The figures of one rank of a layout, in one step.

    device: "cpu" or "cuda", whose path of the code ran. traced: (layers, microbatches) of the models that ran; one
    entry if nothing is extrapolated. formula: the model's formula for FLOPs per rank, without recomputation, averaged
    over ranks. blocks: what the rank's kinds of blocks are compiled to, on a GPU.
    """

    layout: str
    rank: int
    step: Traced
    traced: list[tuple[int, int]]
    formula: float
    seconds: float
    device: str = CPU.type
    blocks: Blocks = field(default_factory=dict)

    @property
    def extrapolated(self) -> bool:
        return len(self.traced) > 1

    def as_json(self) -> dict[str, Any]:
        memory, sent = self.step.memory, self.step.sent
        sizes = {"at_peak": memory.at_peak, "highest": memory.highest, "away": memory.away}
        return {
            "layout": self.layout,
            "rank": self.rank,
            "device": self.device,
            "memory": {"peak_bytes": memory.total, **sizes},
            "communication": [
                {"operation": operation, "axis": axis, "calls": calls, "bytes": size}
                for (operation, axis), (calls, size) in sent.items()
            ],
            "flops": self.step.flops,
            "flops_formula": self.formula,
            "host_syncs": [
                {"operation": operation, "at": place, "times": times}
                for (operation, place), times in self.step.syncs.items()
            ],
            "races": [{"race": race, "times": times} for race, times in self.step.races.items()],
            "blocks": {kind: asdict(block) for kind, block in self.blocks.items()},
            "extrapolated": self.extrapolated,
            "traced": [{"layers": layers, "microbatches": count} for layers, count in self.traced],
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, figures: Mapping[str, Any], seconds: float) -> Exact:
        """Inverse of `as_json`. Raises KeyError or TypeError for anything else."""
        memory = figures["memory"]
        sent = {(e["operation"], e["axis"]): (e["calls"], e["bytes"]) for e in figures["communication"]}
        syncs = {(e["operation"], e["at"]): e["times"] for e in figures["host_syncs"]}
        peak = Peak(memory["peak_bytes"], memory["at_peak"], memory["highest"], memory["away"])
        traced = [(e["layers"], e["microbatches"]) for e in figures["traced"]]
        races = {e["race"]: e["times"] for e in figures["races"]}
        step = Traced(peak, sent, figures["flops"], syncs, races)
        layout, rank, device = figures["layout"], figures["rank"], figures["device"]
        blocks = {kind: Block(**block) for kind, block in figures["blocks"].items()}
        return cls(layout, rank, step, traced, figures["flops_formula"], seconds, device, blocks)


def exact(
    recipe: Recipe, rank: int = 0, kept: bool = True, device: torch.device = CPU, blocks: Blocks | None = None
) -> Exact:
    """Traces a step of a resolved recipe on a rank of its layout. kept: reads and writes the cache. device, blocks: as
    in `step.trace`. Raises UserError: the layout is not valid, or has no such rank."""
    layout = check_rank(recipe, rank)
    began = time.perf_counter()
    entry = CachedFigures(recipe, rank, device.type) if kept else None
    if entry and (figures := entry.read()):
        return figures
    count = microbatches_per_step(recipe)
    layers, counts = sizes(recipe, rank)
    models = {L: recipe.model_copy(update={"model": _deep(recipe.model, L)}) for L in layers}
    steps = {(L, m): trace(models[L], rank, m, device, blocks) for L in layers for m in counts}
    tokens = count * (recipe.train.microbatch_size or 1) * layout.dp * recipe.model.seq_len
    formula = flops_per_token(recipe.model) * tokens / layout.ranks
    step = extrapolate(steps, recipe.model.layers, count)
    seconds = time.perf_counter() - began
    result = Exact(to_text(layout), rank, step, list(steps), formula, seconds, device.type, blocks or {})
    if entry:
        entry.write(result.as_json())
    return result


def timelines(
    recipe: Recipe, rank: int = 0, device: torch.device = CPU, blocks: Blocks | None = None
) -> list[tuple[str, MemoryTimeline]]:
    """Memory over the first step of a rank and over a later one, as traced: with all blocks; and with all microbatches,
    or if that is too much work with so many that the pipeline fills. device, blocks: as in `step.trace`. Raises
    UserError: the layout is not valid, or has no such rank."""
    check_rank(recipe, rank)
    count = whole = microbatches_per_step(recipe)
    layout, position = _place(recipe, rank)
    if _blocks(recipe.model, layout, position) * count > DRAWN:
        count = max(fewer(count, layout))
    which = "" if count == whole else f", the first {count} of {whole} microbatches"
    both = [probe(recipe, rank, count, device, first, blocks=blocks) for first in (True, False)]
    names = (f"{name}, rank {rank}{which}" for name in ("first step", "a later step"))
    drawn = (one.timeline(timed=False, rank=rank, step=step) for step, one in enumerate(both, 1))
    return list(zip(names, drawn, strict=True))


def check_rank(recipe: Recipe, rank: int) -> Layout:
    """The recipe's layout. Raises UserError: it is not valid, or has no such rank; or servers update the weights, whose
    messages no trace sees."""
    layout = Layout.from_recipe(recipe.layout)
    if recipe.servers.count:
        raise UserError('steps with sync.method = "server" are not traced')
    validate(layout, layout.ranks)
    if not 0 <= rank < layout.ranks:
        nearest = min(max(rank, 0), layout.ranks - 1)
        raise UserError(
            f"rank {rank}: layout '{to_text(layout)}' has {layout.ranks} ranks, 0 to {layout.ranks - 1}. "
            f"Nearest valid: {nearest}"
        )
    return layout


def blocks_traced(recipe: Recipe, rank: int) -> int:
    """Number of blocks times microbatches that `exact` traces; each takes about 25 ms on one core."""
    (layers, counts), place = sizes(recipe, rank), _place(recipe, rank)
    return sum(_blocks(_deep(recipe.model, L), *place) for L in layers) * sum(counts)


def sizes(recipe: Recipe, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of layers and of microbatches to trace: one of each, or two where one would be too much work. Blocks
    that differ in more than experts are all traced."""
    model, count = recipe.model, microbatches_per_step(recipe)
    layout, position = _place(recipe, rank)
    if _blocks(model, layout, position) * count <= AS_IT_IS:
        return (model.layers,), (count,)
    layers = depths(model, layout, position, recipe.replica_groups.fragments)
    if len(set(kinds(recipe))) > len(set(card_of(model).mixed)):
        layers = (model.layers,)
    return layers, fewer(count, layout)


def _place(recipe: Recipe, rank: int) -> tuple[Layout, int]:
    """The layout of a rank's replica group, and the rank's position in its pipeline."""
    layout = replica_group_layout(Layout.from_recipe(recipe.layout), recipe.replica_groups.count)
    return layout, layout.coordinates(in_replica_group(layout, rank)[1])["pp"]


def depths(model: ModelSection, layout: Layout, position: int, fragments: int = 1) -> tuple[int, ...]:
    """Two small numbers of layers to extrapolate from, or the model's own if there are none. With them, every stage at
    this pipeline position, and every fragment, loses the same number of blocks."""
    stages = _stages(model, layout, position)
    everywhere = layout.pp * layout.stages_per_rank // layout.copies  # stages of the model
    layers: list[int] = []
    least = LEAST_SHARDED if layout.zero and layout.shards > 1 else LEAST_BLOCKS
    if OFFLOADS[layout.offload].gradients != "device":
        least = LEAST_MOVED + layout.offload_window
    for less in range(min(map(sum, stages)) - least, 0, -1):
        small = _deep(model, model.layers - less * everywhere)
        if less * everywhere % fragments or small.layers < fragments:
            continue
        if _stages(small, layout, position) == [(dense, other - less) for dense, other in stages]:
            layers.append(small.layers)
        if len(layers) == 2:
            return tuple(layers)
    return (model.layers,)


def fewer(microbatches: int, layout: Layout) -> tuple[int, ...]:
    """Two small numbers of microbatches that fill the pipeline and are held as all of them are; the number itself
    where these two would be more work.

    FILLING per pipeline rank reach the most live activations. The sends under way and the batches held repeat after
    another one, or two where a rank has several stages (found by tracing every schedule; tested).
    """
    first = layout.few(microbatches, FILLING + min(layout.stages_per_rank, 2) * (layout.pp > 1))
    pair = first, first + (layout.round_microbatches or layout.pp)
    return pair if sum(pair) < microbatches else (microbatches,)


def extrapolate(steps: Mapping[tuple[int, int], Traced], layers: int, microbatches: int) -> Traced:
    """Extrapolates to a depth and a number of microbatches, from one or two of each."""
    at_depth = {
        depth: _follow({m: step for (L, m), step in steps.items() if depth == L}, microbatches)
        for depth in {layers for layers, _ in steps}
    }
    step = _follow(at_depth, layers)
    return replace(step, memory=step.memory.of_phases())


def _follow(points: Mapping[int, Any], x: int) -> Any:
    """The figures at x on the line through those of one or two points, number by number. None: a point has none, which
    counts as 0."""
    if len(points) == 1:
        return next(iter(points.values()))
    like = next(figures for figures in points.values() if figures is not None)
    if isinstance(like, int):
        (x1, y1), (x2, y2) = sorted((at, y or 0) for at, y in points.items())
        return y1 + (y2 - y1) * (x - x1) // (x2 - x1)
    if isinstance(like, tuple):
        return tuple(_follow({at: y and y[i] for at, y in points.items()}, x) for i in range(len(like)))
    if isinstance(like, dict):
        keys = dict.fromkeys(key for figures in points.values() for key in figures or ())
        return {key: _follow({at: (y or {}).get(key) for at, y in points.items()}, x) for key in keys}
    return replace(
        like, **{name: _follow({at: vars(y)[name] for at, y in points.items()}, x) for name in vars(like)}
    )


def _stages(model: ModelSection, layout: Layout, position: int) -> list[tuple[int, int]]:
    """(leading dense blocks, other blocks) of each stage at a pipeline position."""
    card = card_of(model)
    stages = [stage_blocks(card, layout)[stage] for stage in stages_of(layout, position)]
    dense = [sum(card.has_experts and not card.is_mixed(number) for number in blocks) for blocks in stages]
    return [(before, len(blocks) - before) for before, blocks in zip(dense, stages, strict=True)]


def _blocks(model: ModelSection, layout: Layout, position: int) -> int:
    """Number of blocks at a pipeline position."""
    return sum(map(sum, _stages(model, layout, position)))


def _deep(model: ModelSection, layers: int) -> ModelSection:
    return model.model_copy(update={"layers": layers})


SECTIONS = ("model", "optim", "layout", "sync", "precision")
FIELDS = ("global_batch_size", "microbatch_size", "z_loss")  # of [train]


class CachedFigures:
    """The figures of one rank of a resolved recipe. device: "cpu" or "cuda", whose path of the code is traced."""

    def __init__(self, recipe: Recipe, rank: int, device: str = "cpu") -> None:
        world, replica_groups = Layout.from_recipe(recipe.layout).ranks, recipe.replica_groups
        steps = recipe.train.steps or 1
        # "auto" depends on the processor
        mode = compute_mode(recipe, CPU).name if device == "cpu" else recipe.precision.mode
        key = {
            "recipe": {name: getattr(recipe, name).model_dump(mode="json") for name in SECTIONS},
            "train": {name: getattr(recipe.train, name) for name in FIELDS},
            "documents": recipe.data.document_masks,
            "mode": mode,
            "rank": rank,
            "outer": replica_groups.due(replica_groups.traced(steps), steps),  # what the traced step sends
            "device": device,
            "threads": threads_of(world),  # some kernels have workspace per thread
            "native": not native.why_not(),
            "fp16": has_cpu_fp16(),  # else it is multiplied in fp32
            "bf16": has_cpu_bf16(),  # else PyTorch adds biases
            "code": [_source(), torch.__version__],
        }
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        self.path = cache_folder(recipe.data.cache) / "traces" / f"{name}.json"

    def read(self) -> Exact | None:
        """The figures that were kept; None if there are none, or broken ones."""
        began = time.perf_counter()
        with suppress(OSError, ValueError, KeyError, TypeError):
            figures = json.loads(self.path.read_text(encoding="utf-8"))
            return Exact.from_json(figures, time.perf_counter() - began)
        return None

    def write(self, figures: dict[str, Any]) -> None:
        with suppress(UserError), writable(self.path.parent):
            write_atomically(self.path, json.dumps(figures))


@cache
def _source() -> str:
    """A hash of the trainer's code and the planner's."""
    digest = hashlib.sha256()
    for folder in (Path(fivefold.__file__).parent, Path(__file__).parents[1]):
        for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.c"), *folder.rglob("*.cpp")]):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def beside(plan: Plan, exact: Exact) -> Iterator[str]:
    """Lines of text: memory by category, messages by axis, FLOPs, host syncs."""
    where = "a CPU" if exact.device == "cpu" else "a GPU"
    how = f"the trainer's own step, traced as {where} computes it"
    if exact.extrapolated:
        models = ", ".join(f"{layers} layers x {count} microbatches" for layers, count in exact.traced)
        how = f"the trainer's own step as {where} computes it, extrapolated from {models}"
    replica_groups, several = plan.setting.replica_groups, plan.setting.replica_groups.count > 1
    outer = f"; the last of {replica_groups.every} inner steps, with its outer step" if several else ""
    yield f"exact figures of rank {exact.rank}, {exact.seconds:.1f} s: {how}{outer}"
    replica_group = plan.setting.layout
    position = replica_group.coordinates(in_replica_group(replica_group, exact.rank)[1])["pp"]
    predicted, memory = plan.memory[position], exact.step.memory
    away = [name for name in AWAY if memory.away[name]]
    names = (*CATEGORIES, "total", *away)
    yield "  memory, GiB    " + "".join(f"{name:>12}" for name in names)
    rows = {
        "at the peak": [*memory.at_peak.values(), memory.total, *(memory.away[name] for name in away)],
        "predicted": [getattr(predicted, name) for name in names],
    }
    for name, values in rows.items():
        yield f"    {name:13}" + "".join(f"{value / GIB:12.4g}" for value in values)
    # Messages by operation and axis; their bytes are the larger of input and output.
    yield "  messages                        calls         GiB"
    for (operation, axis), (calls, size) in exact.step.sent.items():
        yield f"    {axis:10}{operation:16}{calls:9,}{size / GIB:12.4g}"
    if plan.sent:
        told = ", ".join(f"{axis} {size / GIB:.4g} GiB" for axis, size in plan.sent.items())
        average = ", on average" * several
        yield f"    predicted{average}, as rings send them: {told}"
    yield (
        f"  FLOPs          {exact.step.flops:.4g} in matmuls; the model's formula, without recomputation, has "
        f"{exact.formula:.4g} per rank"
    )
    for kind, block in exact.blocks.items():
        yield f"  a block ({kind}): {block.text}"
    yield f"  host syncs     {sum(exact.step.syncs.values()):,}"
    for (operation, place), times in exact.step.syncs.items():
        yield f"    {operation:22}{times:6,}  {place}"
    if exact.device != "cpu":
        yield f"  races between streams {sum(exact.step.races.values()):,}"
        yield from (f"    {times:,} x {race}" for race, times in exact.step.races.items())
