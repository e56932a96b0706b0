"""Measures this machine for the planner (`fivefold bench hardware`). Also runs layouts of a recipe on it for a few
steps (`fivefold compare --measure`).

It measures one rank with all cores, then 2 and 4 local ranks with their shares of the cores, all at once. This takes
about two minutes.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fivefold.errors import BusyError, UserError, several
from fivefold.files import read_json, write
from fivefold.host import cores, memory_bytes, tables
from fivefold.host.machine import has_fast_bf16, keep_freed_memory
from fivefold.launch.local import returned
from fivefold.launch.ranks import Ranks
from fivefold.parallel.mesh import Microbatch
from fivefold.parallel.offload.disk import folder_of
from fivefold.precision import MASTER, TRAINED
from fivefold.recipe import Recipe, change, load, microbatches_per_step, resolve, to_toml
from fivefold.recipe.resolve import in_layout
from fivefold.sharding.layout import Layout, to_text
from fivefold.step.state import build_state
from fivefold.step.step import take_step
from fivefold.train.peak import UNDISTURBED, device_peak, measure_apart
from fivefold_plan.bench import hardware
from fivefold_plan.bench.collectives import links
from fivefold_plan.bench.hardware import bandwidth, encodings
from fivefold_plan.cluster import devices, measured
from fivefold_plan.cluster.measured import Measured, Share
from fivefold_plan.predict import predict, resolved

WORLDS = (1, 2, 4)


def measure(say: Callable[[str], None] = lambda text: None, busy: bool = False) -> Measured:
    """Measures, and saves the table in the cache. `say` gets a line for each part.

    The process must have used neither torch's threads nor a GPU: ranks are forked. busy: other programs may take the
    cores meanwhile. Raises BusyError: they do, before or at the end. The table is not saved."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    units = gpus or cores()
    dtypes = list(TRAINED) if has_fast_bf16("cuda" if gpus else "cpu") else [MASTER]
    keep_freed_memory()
    if not busy:
        _require_cores(dtypes[-1])
    disk = _disk(say)
    found: dict[int, dict[str, Any]] = {}
    for world in WORLDS:
        if gpus and world > gpus:
            continue
        say(f"{several(world, 'rank')} on {several(units, 'GPU' if gpus else 'core')}")
        found[world] = returned(partial(_measure_rank, dtypes, world <= units), world, fork=not gpus)
    device, two = "cuda" if gpus else "cpu", found.get(2, {"free": 0.0, "added": {}, "spread": 0.0})
    memory = torch.cuda.get_device_properties(0).total_memory * units if gpus else float(memory_bytes())
    table = Measured(
        machine=tables.key(),
        device=device,
        cores=units,
        memory=memory,
        disk=disk["write"],
        peak={dtype: device_peak(device, dtype) * (gpus or 1) for dtype in dtypes},
        shares={n: Share(n, **part["share"]) for n, part in found.items() if "share" in part},
        links={n: part["links"] for n, part in found.items() if "links" in part},
        free=1.0 if gpus else two["free"],
        host=found[1]["plain"] | two["added"],
        axes={},
        spread=two["spread"],
        disk_read=disk["read"],
        disk_both=disk["both"],
    )
    table = replace(table, axes=_axes(table, found, dtypes[-1]))
    if not busy:
        _require_cores(dtypes[-1])
    measured.save(table)
    return table


def _require_cores(dtype: str) -> None:
    """Multiplies for some seconds on all cores. Raises BusyError: other programs took a part of them."""
    share = measure_apart(dtype, cores())["share"]
    if share < UNDISTURBED:
        raise BusyError(
            f"other programs take {1 - share:.0%} of this machine's cores, so the table would be wrong and is not "
            f"saved; at most {1 - UNDISTURBED:.0%} is allowed. Stop them and repeat `fivefold bench hardware`, or add "
            "--busy to save the table all the same"
        )


def _disk(say: Callable[[str], None]) -> dict[str, float]:
    """Of the folder where offload keeps its files by default. Where it cannot, the rates of a usual disk."""
    try:
        return bandwidth(folder_of(""))
    except (UserError, OSError) as error:
        say(f"the disk is assumed, not measured: {error}")
        return dict.fromkeys(("write", "read", "both"), devices.DISK)


def _axes(
    table: Measured, found: dict[int, dict[str, Any]], dtype: str
) -> dict[int, dict[str, list[list[float]]]]:
    """Measured time of blocks with each axis, minus the table's prediction: the ranks wait for each other."""
    axes: dict[int, dict[str, list[list[float]]]] = {}
    cluster = devices.of_table(replace(table, axes={}))
    for world, part in found.items():
        for name, points in part.get("blocks", {}).items():
            rows = axes.setdefault(world, {}).setdefault(name, [])
            for model, (elements, seconds) in zip(MODELS, points, strict=True):
                few, many = (predict(r, cluster).step.seconds for r in recipes(name, world, model, dtype))
                rows.append([elements, seconds - per_block(few, many)])
    return axes


def _measure_rank(dtypes: list[str], has_cores: bool, ranks: Ranks) -> dict[str, Any]:
    device, found = ranks.device, dict[str, Any]()
    if has_cores:
        matmuls = {d: hardware.products(d, device, measured.SIZES, measured.LARGEST) for d in dtypes}
        found["share"] = {
            "threads": torch.get_num_threads() if device.type == "cpu" else 1,
            "products": matmuls,
            "attention": {d: hardware.attention(d, device) for d in dtypes},
            "ring": {d: hardware.ring(d, device) for d in dtypes},
            "streams": {
                d: hardware.streams(d, device) | {"optimizer": hardware.optimizer(d, device)} for d in dtypes
            },
            "encodings": encodings(device),
        }
        # Standard deviation of the ranks' mean rates, as a share of their mean
        rates = [r for roles in matmuls.values() for grid in roles.values() for r in grid.values()]
        speeds = [torch.zeros(1, device=device) for _ in range(ranks.world)]
        if ranks.world > 1:
            dist.all_gather(speeds, torch.tensor([fmean(map(math.log, rates))], device=device))
        found["spread"] = pstdev([speed.item() for speed in speeds])
    if ranks.world == 1:
        found["plain"] = plain(ranks)
    else:
        found["links"], found["free"] = links(ranks.device)
        if ranks.device.type == "cpu":  # on GPUs, processors do not wait for computation
            found["blocks"] = blocks(ranks, dtypes[-1])
    if ranks.world == 2:
        at_once = links(ranks.device, {4 << 10: 40}, after_computing=False)[0]
        found["added"] = added(ranks, at_once)
    return found


VOCABULARY = 64
STEPS, WARM_UP = 14, 3
BLOCKS, MICROBATCHES = (2, 6), (1, 3)
MODELS = ((32, 64), (192, 256))
"""Tokens and dim of the models for measuring axes: one with almost no work, one whose operations take time."""


def plain(ranks: Ranks, layout: str = "dp=1", steps: int = STEPS) -> dict[str, float]:
    """Overheads by name. A step of L blocks and m microbatches takes "step" + L "block step" + m ("microbatch" +
    L "block")."""
    (l1, l2), (m1, m2) = BLOCKS, MICROBATCHES
    took = {
        (layers, m): _seconds(_recipe(layout, layers, m), ranks, steps)
        for layers in BLOCKS
        for m in MICROBATCHES
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
    few, many = (_seconds(_recipe("pp=2", 2, m), ranks, steps) for m in (4, 12))
    found["stage"] = max(0.0, (many - few) / 8 - base["block"] - base["microbatch"] / 2 - 2 * send)
    return found


def blocks(ranks: Ranks, dtype: str, steps: int = STEPS // 2) -> dict[str, list[list[float]]]:
    """[elements of a rank's activations, total seconds per block and microbatch], by axis that communicates within a
    block. The axis has 2 ranks, and the others are data parallel."""
    found: dict[str, list[list[float]]] = {}
    for name in measured.AXES:
        for model in MODELS:
            pair = recipes(name, ranks.world, model, dtype)
            elements = math.prod(model) // pair[0].layout.cp
            seconds = per_block(*(_seconds(recipe, ranks, steps) for recipe in pair))
            found.setdefault(name, []).append([elements, seconds])
    return found


def recipes(name: str, world: int, model: tuple[int, int], dtype: str) -> tuple[Recipe, Recipe]:
    """Recipes of an axis, with few and with many blocks."""
    layout = f"{measured.AXES[name]},dp={world // 2}"
    few, many = (_recipe(layout, layers, MICROBATCHES[1], model, dtype) for layers in BLOCKS)
    return few, many


def per_block(few: float, many: float) -> float:
    """Seconds per block and microbatch, given the step times of `recipes`."""
    return (many - few) / (BLOCKS[1] - BLOCKS[0]) / MICROBATCHES[1]


def _recipe(
    layout: str, layers: int, microbatches: int, model: tuple[int, int] = MODELS[0], dtype: str = MASTER
) -> Recipe:
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
    state.parallel.close()
    return median(laps[min(WARM_UP, steps - 1) :])


def measure_layouts(
    recipe: Recipe, layouts: Sequence[Layout], steps: int
) -> Iterator[tuple[Layout, dict[str, Any] | str]]:
    """(layout, its figures or why there are none) of each layout: step_s, the median step; memory_bytes, most bytes of
    tensors at once on rank 0; sent_bytes by axis, of the rank that sends most."""
    with tempfile.TemporaryDirectory(prefix="fivefold-compare-") as name:
        folder = Path(name)
        tokens = folder / "tokens.bin"
        full = resolved(recipe)
        count = max(2 * full.train.global_batch_size, 64) * (full.model.seq_len + 1)
        ids = np.random.default_rng(0).integers((full.model.vocab_size or 2) - 1, size=count)
        write(tokens, ids.astype("<u4").tobytes())
        for number, layout in enumerate(layouts):
            try:
                short = _short(recipe, layout, tokens, steps)
            except UserError as error:
                yield layout, " ".join(str(error).split())
            else:
                yield layout, _measured(short, folder / f"run-{number}")


def _short(recipe: Recipe, layout: Layout, tokens: Path, steps: int) -> Recipe:
    """The recipe with a few steps on these tokens, and no work besides."""
    vocabulary = resolved(recipe).model.vocab_size
    values = {
        "model.vocab_size": vocabulary,
        "data.source": f"tokens:{tokens}",
        "data.validation": "[]",
        "data.token_dtype": "uint32",
        "data.val_fraction": 0,
        "data.max_epochs": 0,
        "train.steps": steps,
        "train.batch_ramp": '""',
        "model.window_ramp": '""',
        "train.val_every": 0,
        "train.sample_every": 0,
        "checkpoint.every": 0,
        "launch.restarts": 0,
        "optim.warmup_steps": 1,
        "observe.memory_step": 3,
        "observe.tracker": "none",
    }
    return change(in_layout(recipe, layout), [f"{key}={value}" for key, value in values.items()])


def _measured(recipe: Recipe, run: Path) -> dict[str, Any] | str:
    file = run.with_suffix(".toml")
    text = to_text(Layout.from_recipe(recipe.layout))
    write(file, to_toml(recipe, comment=text))
    command = [sys.executable, "-P", "-m", "fivefold", "train", str(file), "--out", str(run)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith(("error:", "failed:"))]
        return (said or done.stderr.strip().splitlines() or ["the run failed"])[-1]
    try:
        return read_json(run / "plan.json")["measured"]
    except (OSError, KeyError, UserError):
        return "the run wrote no figures"
