"""The exact figures of a rank: memory, messages, FLOPs and host syncs of its step, for a model of any size.

A small step is traced as it is. A large one is extrapolated from two depths and two numbers of microbatches: each block
of a stage adds the same amount, and so does each microbatch once the pipeline is full.

Two figures are not linear. The number of gradient messages at ZeRO stage 0 is not, since a bucket ends behind the
parameter that fills it (their bytes are linear). A peak is not, if it occurs at another moment in the small model:
tokens of many microbatches, which wait for their turn, can make it come earlier (0.1% of a tiny model, interleaved).

Figures are kept in the cache folder, by everything they depend on: recipe, rank, and the code of Fivefold and PyTorch.
A missing, broken or unwritable file is not an error: the step is traced again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fivefold.errors import UserError
from fivefold.files import cache_folder, writable, write_atomically
from fivefold.host.machine import has_cpu_bf16, has_cpu_fp16
from fivefold.kernels import native
from fivefold.kernels.fake import CPU
from fivefold.launch.ranks import threads_of
from fivefold.models.card import card_of
from fivefold.models.recomputation import of_blocks
from fivefold.models.section import ModelSection
from fivefold.recipe import Recipe, flops_per_token, microbatches_per_step
from fivefold.schedules.pipeline import FILLING, few
from fivefold.schedules.timelines import MemoryTimeline
from fivefold.sharding.layout import Layout
from fivefold.sharding.layout_rules import validate
from fivefold.sharding.layout_text import to_text
from fivefold.sharding.parts import stage_blocks, stages_of
from fivefold.sharding.sites import in_site, site_layout
from fivefold.step.state import compute_mode
from fivefold.trace.memory import Peak
from fivefold.trace.step import Traced, probe, trace

AS_IT_IS = 128  # blocks times microbatches that are traced without extrapolation: about three seconds
DRAWN = 1024  # the same, of a picture over time, which cannot be extrapolated: half a minute
LEAST_BLOCKS = 2  # of a stage in a small model
LEAST_SHARDED = 3  # the same under ZeRO, which may hold the weights of three blocks at once

Figures = Mapping[tuple[str, ...], int]


@dataclass(frozen=True)
class Exact:
    """The figures of one rank of a layout, in one step.

    device: "cpu" or "cuda", whose path of the code ran. traced: (layers, microbatches) of the models that ran; one
    entry if nothing is extrapolated. formula: the model's formula for FLOPs per rank, without recomputation, averaged
    over ranks.
    """

    layout: str
    rank: int
    step: Traced
    traced: list[tuple[int, int]]
    formula: float
    seconds: float
    device: str = CPU.type

    @property
    def extrapolated(self) -> bool:
        return len(self.traced) > 1

    def as_json(self) -> dict[str, Any]:
        memory, sent = self.step.memory, self.step.sent
        return {
            "layout": self.layout,
            "rank": self.rank,
            "device": self.device,
            "memory": {
                "peak_bytes": memory.total,
                "at_peak": memory.at_peak,
                "highest": memory.highest,
                "away": memory.away,
            },
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
            "extrapolated": self.extrapolated,
            "traced": [{"layers": layers, "microbatches": count} for layers, count in self.traced],
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any], seconds: float) -> Exact:
        """Inverse of `as_json`. Raises KeyError or TypeError for anything else."""
        memory = found["memory"]
        sent = {(e["operation"], e["axis"]): (e["calls"], e["bytes"]) for e in found["communication"]}
        syncs = {(e["operation"], e["at"]): e["times"] for e in found["host_syncs"]}
        peak = Peak(memory["peak_bytes"], memory["at_peak"], memory["highest"], memory["away"])
        traced = [(e["layers"], e["microbatches"]) for e in found["traced"]]
        step = Traced(peak, sent, found["flops"], syncs)
        layout, rank, device = found["layout"], found["rank"], found["device"]
        return cls(layout, rank, step, traced, found["flops_formula"], seconds, device)


def exact(recipe: Recipe, rank: int = 0, kept: bool = True, device: torch.device = CPU) -> Exact:
    """Traces a step of a resolved recipe on a rank of its layout. kept: reads and writes the cache. device: as in
    `step.trace`.

    Raises:
        UserError: the layout is not valid, or has no such rank.
    """
    layout = check_rank(recipe, rank)
    began = time.perf_counter()
    entry = CachedFigures(recipe, rank, device.type) if kept else None
    if entry and (found := read(entry)):
        return found
    count = microbatches_per_step(recipe)
    site = site_layout(layout, recipe.sites.count)
    layers, counts = _sizes(recipe, site, rank)
    steps = {(L, m): trace(_with_layers(recipe, L), rank, m, device) for L in layers for m in counts}
    tokens = count * (recipe.train.microbatch_size or 1) * layout.dp * recipe.model.seq_len
    formula = flops_per_token(recipe.model) * tokens / layout.ranks
    step = extrapolate(steps, recipe.model.layers, count)
    seconds = time.perf_counter() - began
    result = Exact(to_text(layout), rank, step, list(steps), formula, seconds, device.type)
    if entry:
        entry.write(result.as_json())
    return result


def timelines(recipe: Recipe, rank: int = 0, device: torch.device = CPU) -> list[tuple[str, MemoryTimeline]]:
    """Memory over the first step of a rank and over a later one, as traced: with all blocks; and with all microbatches,
    or if that is too much work with so many that the pipeline fills.

    Raises:
        UserError: the layout is not valid, or has no such rank.
    """
    layout = check_rank(recipe, rank)
    all_of_them = microbatches_per_step(recipe)
    site = site_layout(layout, recipe.sites.count)
    position = site.coordinates(in_site(site, rank)[1])["pp"]
    count = all_of_them
    if sum(map(sum, _stages(recipe.model, site, position))) * count > DRAWN:
        count = max(fewer(count, site))
    told = "" if count == all_of_them else f", the first {count} of {all_of_them} microbatches"
    found = []
    for name, first in (("first step", True), ("a later step", False)):
        timeline = probe(recipe, rank, count, device, first).timeline(timed=False, rank=rank, step=2 - first)
        found.append((f"{name}, rank {rank}{told}", timeline))
    return found


def read(entry: CachedFigures) -> Exact | None:
    """The figures that were kept; None if there are none, or broken ones."""
    began, found = time.perf_counter(), entry.read()
    if found is not None:
        with suppress(KeyError, TypeError):
            return Exact.from_json(found, time.perf_counter() - began)
    return None


def check_rank(recipe: Recipe, rank: int) -> Layout:
    """The recipe's layout.

    Raises:
        UserError: it is not valid, or has no such rank; or servers update the weights, whose messages no trace sees.
    """
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
    layout = site_layout(Layout.from_recipe(recipe.layout), recipe.sites.count)
    layers, counts = _sizes(recipe, layout, rank)
    position = layout.coordinates(in_site(layout, rank)[1])["pp"]
    blocks = sum(sum(map(sum, _stages(_deep(recipe.model, L), layout, position))) for L in layers)
    return blocks * sum(counts)


def _sizes(recipe: Recipe, site: Layout, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`sizes` of a recipe. Blocks with different modes of recomputation are all traced. rank: of the whole run."""
    count, number = microbatches_per_step(recipe), in_site(site, rank)[1]
    layers, counts = sizes(recipe.model, site, number, count, recipe.sites.fragments)
    if len(layers) > 1 and len(set(of_blocks(site.recompute, recipe.model.layers))) > 1:
        layers = (recipe.model.layers,)
    return layers, counts


def sizes(
    model: ModelSection, layout: Layout, rank: int, microbatches: int, fragments: int = 1
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of layers and of microbatches to trace: one of each, or two where one would be too much work.
    fragments: of the outer step, if there are several sites."""
    position = layout.coordinates(rank)["pp"]
    if sum(map(sum, _stages(model, layout, position))) * microbatches <= AS_IT_IS:
        return (model.layers,), (microbatches,)
    return depths(model, layout, position, fragments), fewer(microbatches, layout)


def depths(model: ModelSection, layout: Layout, position: int, fragments: int = 1) -> tuple[int, ...]:
    """Two small numbers of layers to extrapolate from, or the model's own if there are none. With them, every stage at
    this pipeline position, and every fragment, loses the same number of blocks."""
    own = _stages(model, layout, position)
    everywhere = layout.pp * layout.stages_per_rank
    found: list[int] = []
    least = LEAST_SHARDED if layout.zero and layout.shards > 1 else LEAST_BLOCKS
    for less in range(min(map(sum, own)) - least, 0, -1):
        small = _deep(model, model.layers - less * everywhere)
        if less * everywhere % fragments or small.layers < fragments:
            continue
        if _stages(small, layout, position) == [(dense, other - less) for dense, other in own]:
            found.append(small.layers)
        if len(found) == 2:
            return tuple(found)
    return (model.layers,)


def fewer(microbatches: int, layout: Layout) -> tuple[int, ...]:
    """Two small numbers of microbatches that fill the pipeline and are held as all of them are; the number itself
    where these two would be more work.

    FILLING per pipeline rank reach the most live activations. The sends under way and the batches held repeat after
    another one, or two where a rank has several stages (found by tracing every schedule; tested).
    """
    first = few(microbatches, layout.pp, FILLING + min(layout.stages_per_rank, 2) * (layout.pp > 1))
    pair = first, first + layout.pp
    return pair if sum(pair) < microbatches else (microbatches,)


def extrapolate(steps: Mapping[tuple[int, int], Traced], layers: int, microbatches: int) -> Traced:
    """Extrapolates to a depth and a number of microbatches, from one or two of each."""
    table = {size: _figures(step) for size, step in steps.items()}
    depths, counts = (sorted({size[i] for size in table}) for i in (0, 1))
    at_depth = {
        depth: _follow({count: table[depth, count] for count in counts}, microbatches) for depth in depths
    }
    return _traced(_follow(at_depth, layers))


def _follow(table: Mapping[int, Figures], x: int) -> Figures:
    """Evaluates the line through two points at x. A single point is returned as it is."""
    if len(table) == 1:
        return next(iter(table.values()))
    (x1, first), (x2, second) = table.items()

    def at(key: tuple[str, ...]) -> int:
        y1, y2 = first.get(key, 0), second.get(key, 0)
        return y1 + (y2 - y1) * (x - x1) // (x2 - x1)

    return {key: at(key) for key in {**first, **second}}


def _figures(step: Traced) -> Figures:
    memory = step.memory
    by_category = {"at_peak": memory.at_peak, "highest": memory.highest, "away": memory.away}
    return {
        ("flops",): step.flops,
        ("total",): memory.total,
        **{(kind, name): size for kind, sizes in by_category.items() for name, size in sizes.items()},
        **{("sync", *key): times for key, times in step.syncs.items()},
        **{("calls", *key): calls for key, (calls, _) in step.sent.items()},
        **{("bytes", *key): size for key, (_, size) in step.sent.items()},
    }


def _traced(figures: Figures) -> Traced:
    """Inverse of `_figures`."""

    def of(kind: str) -> dict[tuple[str, ...], int]:
        return {key[1:]: number for key, number in figures.items() if key[0] == kind}

    at_peak, highest, away = (
        {name: size for (name,), size in of(kind).items()} for kind in ("at_peak", "highest", "away")
    )
    sizes = of("bytes")
    sent = {(op, axis): (calls, sizes[op, axis]) for (op, axis), calls in sorted(of("calls").items())}
    syncs = {(op, place): times for (op, place), times in of("sync").items()}
    return Traced(Peak(figures["total",], at_peak, highest, away), sent, figures["flops",], syncs)


def _stages(model: ModelSection, layout: Layout, position: int) -> list[tuple[int, int]]:
    """(leading dense blocks, other blocks) of each stage at a pipeline position."""
    card = card_of(model)
    blocks, mixed = stage_blocks(card, layout), card.is_mixed
    found = []
    for stage in stages_of(layout, position):
        before = sum(not mixed(number) for number in blocks[stage]) if card.has_experts else 0
        found.append((before, len(blocks[stage]) - before))
    return found


def _deep(model: ModelSection, layers: int) -> ModelSection:
    return model.model_copy(update={"layers": layers})


def _with_layers(recipe: Recipe, layers: int) -> Recipe:
    return recipe.model_copy(update={"model": _deep(recipe.model, layers)})


SECTIONS = ("model", "optim", "layout", "sync", "precision")
FIELDS = ("global_batch_size", "microbatch_size", "z_loss")  # of [train]


class CachedFigures:
    """The figures of one rank of a resolved recipe. device: "cpu" or "cuda", whose path of the code is traced."""

    def __init__(self, recipe: Recipe, rank: int, device: str = "cpu") -> None:
        world, sites = Layout.from_recipe(recipe.layout).ranks, recipe.sites
        steps = recipe.train.steps or 1
        key = {
            "recipe": {name: getattr(recipe, name).model_dump(mode="json") for name in SECTIONS},
            "train": {name: getattr(recipe.train, name) for name in FIELDS},
            # "auto" depends on the processor
            "mode": compute_mode(recipe, torch.device("cpu")).name
            if device == "cpu"
            else recipe.precision.mode,
            "rank": rank,
            "outer": sites.due(sites.traced(steps), steps),  # what the traced step sends
            "device": device,
            "threads": threads_of(world),  # some kernels have workspace per thread
            "native": not native.why_not(),
            "fp16": has_cpu_fp16(),  # else it is multiplied in fp32
            "bf16": has_cpu_bf16(),  # else PyTorch adds biases
            "code": [_source(), torch.__version__],
        }
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        self.path = cache_folder(recipe.data.cache) / "traces" / f"{name}.json"

    def read(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def write(self, figures: dict[str, Any]) -> None:
        with suppress(UserError), writable(self.path.parent):
            write_atomically(self.path, json.dumps(figures))


@cache
def _source() -> str:
    """A hash of the package's code."""
    folder, found = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.c"), *folder.rglob("*.cpp")]):
        found.update(path.read_bytes())
    return found.hexdigest()
