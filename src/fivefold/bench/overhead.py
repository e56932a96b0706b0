"""Measures the seconds of a step outside of operations: Python, autograd, dispatch. The trainer's own step runs on
models so small that nothing else is left."""

from __future__ import annotations

import math
import time
from statistics import median

import torch

from fivefold.launch.ranks import Ranks
from fivefold.parallel.mesh import Microbatch
from fivefold.recipe import Recipe, load, microbatches_per_step, resolve
from fivefold.sharding.layout import Layout
from fivefold.step.state import build_state
from fivefold.step.step import take_step

VOCABULARY = 64
STEPS, WARM_UP = 14, 3
BLOCKS, MICROBATCHES = (2, 6), (1, 3)
AXES = {"tp": "tp=2", "sp": "tp=2,sp=true", "ring": "cp=2", "ulysses": "cp=2,cp_method=ulysses"}
MODELS = ((32, 64), (192, 256))
"""Tokens and dim of the models for measuring axes: one with almost no work, one whose operations take time."""


def plain(ranks: Ranks, layout: str = "dp=1", steps: int = STEPS) -> dict[str, float]:
    """Overheads by name. A step of L blocks and m microbatches takes "step" + L "block step" + m ("microbatch" +
    L "block")."""
    (l1, l2), (m1, m2) = BLOCKS, MICROBATCHES
    took = {
        (layers, m): _step_seconds(ranks, layout, layers, m, steps) for layers in BLOCKS for m in MICROBATCHES
    }
    block = (took[l2, m2] - took[l2, m1] - took[l1, m2] + took[l1, m1]) / (l2 - l1) / (m2 - m1)
    microbatch = (took[l1, m2] - took[l1, m1]) / (m2 - m1) - l1 * block
    per_step = (took[l2, m1] - took[l1, m1]) / (l2 - l1) - m1 * block
    rest = took[l1, m1] - l1 * per_step - m1 * (microbatch + l1 * block)
    found = {"block": block, "microbatch": microbatch, "block step": per_step, "step": rest}
    return {name: max(0.0, seconds) for name, seconds in found.items()}


def added(ranks: Ranks, links: dict[str, list[list[float]]], steps: int = STEPS) -> dict[str, float]:
    """Extra seconds of ZeRO and of a pipeline on two ranks, beyond the time of their messages one after the other
    (`links`). ZeRO: per block and microbatch ("zero3"), and per block and step ("zero3 step"). Pipeline: per stage and
    microbatch."""
    assert ranks.world == 2, ranks.world
    base, found = plain(ranks, "dp=2", steps), {}
    gather, scatter, send = (links[name][0][1] for name in ("all_gather", "scatter_gradients", "send"))
    sent = {1: (0.0, gather + scatter), 2: (scatter, gather), 3: (2 * gather + scatter, 0.0)}
    for zero, (per_microbatch, per_step) in sent.items():
        mine = plain(ranks, f"dp=2,zero={zero}", steps)
        found[f"zero{zero}"] = max(0.0, mine["block"] - base["block"] - per_microbatch)
        found[f"zero{zero} step"] = max(0.0, mine["block step"] - base["block step"] - per_step)
    few, many = (_step_seconds(ranks, "pp=2", 2, m, steps) for m in (4, 12))
    found["stage"] = max(0.0, (many - few) / 8 - base["block"] - base["microbatch"] / 2 - 2 * send)
    return found


def blocks(ranks: Ranks, dtype: str, steps: int = STEPS // 2) -> dict[str, list[list[float]]]:
    """[elements of a rank's activations, total seconds per block and microbatch], by axis that communicates within a
    block. The axis has 2 ranks, and the others are data parallel."""
    found: dict[str, list[list[float]]] = {}
    for name in AXES:
        for model in MODELS:
            pair = recipes(name, ranks.world, model, dtype)
            elements = math.prod(model) // pair[0].layout.cp
            seconds = per_block(*(_seconds(recipe, ranks, steps) for recipe in pair))
            found.setdefault(name, []).append([elements, seconds])
    return found


def recipes(name: str, world: int, model: tuple[int, int], dtype: str) -> tuple[Recipe, Recipe]:
    """Recipes of an axis, with few and with many blocks."""
    few, many = BLOCKS
    layout = f"{AXES[name]},dp={world // 2}"
    return _recipe(layout, few, MICROBATCHES[1], model, dtype), _recipe(
        layout, many, MICROBATCHES[1], model, dtype
    )


def per_block(few: float, many: float) -> float:
    """Seconds per block and microbatch, given the step times of `recipes`."""
    return (many - few) / (BLOCKS[1] - BLOCKS[0]) / MICROBATCHES[1]


def _step_seconds(ranks: Ranks, layout: str, layers: int, microbatches: int, steps: int) -> float:
    return _seconds(_recipe(layout, layers, microbatches, MODELS[0], "fp32"), ranks, steps)


def _recipe(layout: str, layers: int, microbatches: int, model: tuple[int, int], dtype: str) -> Recipe:
    tokens, dim = model
    sets = [f"model.layers={layers}", f"model.dim={dim}", f"model.heads={dim // 32}", f"model.ffn_dim={dim}"]
    sets += [
        f"model.seq_len={tokens}",
        f"precision.mode={dtype}",
        "train.steps=1000",
        "train.microbatch_size=1",
    ]
    dp = Layout.from_recipe(load("quickstart", [], layout).layout).dp
    sets += [f"train.global_batch_size={dp * microbatches}"]
    return resolve(load("quickstart", sets, layout), vocab_size=VOCABULARY)


def _seconds(recipe: Recipe, ranks: Ranks, steps: int) -> float:
    """Median seconds per step, after warm-up steps."""
    state = build_state(recipe, ranks)
    mine = recipe.model.seq_len // recipe.layout.cp
    tokens = torch.zeros(1, mine, dtype=torch.int64, device=ranks.device)
    batch: list[Microbatch] = [Microbatch(tokens, tokens)] * microbatches_per_step(recipe)
    laps = []
    for _ in range(steps):
        began = time.perf_counter()
        take_step(state, recipe, batch).wait()
        laps.append(time.perf_counter() - began)
    for replica in state.parallel.replicas:
        replica.close()
    return median(laps[min(WARM_UP, steps - 1) :])
