"""One trial of `fivefold bench gpu`, in a process of its own: `python -m fivefold.bench.gpu.trials PART TRIAL FILE`.

FILE gets {"rows": ...}, or {"why": ...} if the trial is not possible here. A crash, a hang or no memory ends one trial.

Layouts run by the commands `verify` and `train`. Beside plain PyTorch the trainer's own step runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fivefold.bench import collectives
from fivefold.bench.gpu.doctor import doctor
from fivefold.bench.gpu.kernels import kernels
from fivefold.bench.gpu.parts import OK, ON_CPU, WRONG, Row, judged, recipe_of
from fivefold.bench.gpu.plain import plain_step
from fivefold.bench.machine import measure_layouts
from fivefold.bench.peak import device_peak
from fivefold.comm import everyone
from fivefold.errors import UserError
from fivefold.files import read_json, write
from fivefold.host.devices import sheet_of
from fivefold.host.machine import available
from fivefold.launch.local import start_ranks
from fivefold.launch.ranks import Ranks
from fivefold.observe.format import size as size_text
from fivefold.parallel.mesh import Microbatch
from fivefold.plan.cluster.devices import Cluster
from fivefold.plan.messages.communication import Group, collective, send
from fivefold.plan.predict import Plan, predict, priced_here, resolved
from fivefold.plan.setting import Software
from fivefold.precision import torch_dtype
from fivefold.recipe import Recipe, change, flops_per_token
from fivefold.sharding.layout import Layout
from fivefold.step.state import build_state, compute_mode
from fivefold.step.step import take_step

GIB, MARGIN = 2**30, 0.9  # of the free memory: fragments, NCCL and compiled code take the rest
SIZES = {1 << 20: 20, 16 << 20: 10, 256 << 20: 5}  # bytes of a message: repetitions
TINY_SIZES = {64 << 10: 5, 1 << 20: 5}
LARGE = 16 << 20  # bytes from which a message shows its rate, not its latency
LINK, TIME, MEMORY = 0.8, 1.1, 0.05  # of the planned rate and time; error of the planned bytes
TURNS, STEPS, WARM_UP = 6, 6, 4
REPORT = "please report it with gpu.json"
VERIFIED_ON_CPU = [
    "model.layers=4", "model.dim=64", "model.heads=4", "model.ffn_dim=128", "model.seq_len=32", "data.tokenizer=bytes",
    "train.global_batch_size=8", "train.microbatch_size=2",
]  # fmt: skip
VERIFIED = [*VERIFIED_ON_CPU, "model.dim=256", "model.ffn_dim=768", "model.seq_len=256"]
EXPERTS = ["model.arch=moe", "model.experts=8", "model.experts_per_token=2"]


def verify(gpus: int, name: str) -> Iterator[Row]:
    """name: layout, mode, and perhaps UNFUSED: without our kernels on CPUs, without compiled blocks on GPUs."""
    layout, mode, *unfused = name.split()
    arguments = f"verify quickstart --layout {layout} --mode {mode} --share-gpus --json".split()
    for one in (VERIFIED if gpus else VERIFIED_ON_CPU) + (EXPERTS if "ep=" in layout else []):
        arguments += ["--set", one]
    command = [sys.executable, "-P", "-m", "fivefold", *arguments]
    switched = {"FIVEFOLD_NATIVE": "0", "TORCH_COMPILE_DISABLE": "1"} if unfused else {}
    found = json.loads(subprocess.run(command, env=os.environ | switched, stdout=subprocess.PIPE).stdout)
    if "error" in found:
        raise UserError(found["error"]["message"])
    for kind, allowed in found["tolerance"].items():
        figure = found[kind]
        measured = "not finite" if figure["max_rel"] is None else figure["max_rel"]
        wrong = "" if figure["passed"] else f"largest at {figure['worst']}; {REPORT}"
        yield Row(kind, measured, "", allowed, WRONG if wrong else OK, wrong)


def links(gpus: int, name: str) -> Iterator[Row]:
    """Bytes of the whole message per second, of collectives over all devices."""
    if gpus == 1:
        raise UserError("one GPU sends nothing")
    cluster, _, known = _prices(gpus)
    n, group = gpus or ON_CPU, Group(gpus or ON_CPU, gpus or ON_CPU)
    advice = "look at peer access, NVLink (nvidia-smi topo -m) and NCCL's log (NCCL_DEBUG=INFO)"
    for what, points in _of_ranks(_links, n).items():
        kind = what.partition(" ")[0]
        if kind == "scatter_gradients":  # on GPUs it is the reduce-scatter
            continue
        for size, seconds in points:
            planned = send(size, False, cluster) if kind == "send" else collective(kind, size, group, cluster)
            rate, expected = size / seconds / 1e9, size / planned / 1e9 if known else None
            good = size < LARGE or rate >= LINK * (expected or 0)
            yield judged(f"{what}, {size_text(size)}", rate, "GB/s", expected, good, advice)


def _links(file: Path, ranks: Ranks) -> None:
    sizes = SIZES if ranks.device.type == "cuda" else TINY_SIZES
    found, _ = collectives.links(ranks.device, sizes, after_computing=False)
    if ranks.first:
        write(file, json.dumps(found))


def memory(gpus: int, name: str) -> Iterator[Row]:
    """name: a shape and a layout, which `fivefold train` runs for a few steps."""
    shape, layout = name.split()
    recipe, plan, known = _fitting(gpus, shape, [layout], 1)
    [(_, found)] = measure_layouts(recipe, [Layout.from_recipe(recipe.layout)], STEPS)
    if isinstance(found, str):
        raise UserError(found)
    error = found["memory_bytes"] / plan.peak_bytes - 1
    off = f"{100 * error:+.1f}% of the plan; {REPORT}"
    sizes = found["memory_bytes"] / GIB, "GiB", plan.peak_bytes / GIB
    yield judged("memory, planned", *sizes, abs(error) <= MEMORY if gpus else None, off)
    yield _step_time(found["step_s"], plan, known)


def train(gpus: int, name: str) -> Iterator[Row]:
    """name: a shape. Fivefold and plain PyTorch hold their states at the same time, and take turns."""
    n = gpus or ON_CPU
    layout = f"dp={n},zero=3" if n > 1 else "dp=1"
    recipe, plan, known = _fitting(gpus, name, [layout, f"{layout},recompute=full"], 2)
    found = _of_ranks(partial(_train_rank, recipe), n)
    ours, other = (plan.tokens / median(found[side]["seconds"]) for side in ("fivefold", "plain"))
    device = "cuda" if gpus else "cpu"
    peak = max(1, gpus) * device_peak(device, compute_mode(recipe, torch.device(device)).measured)
    utilization = 100 * flops_per_token(recipe.model) / peak
    slower = f"{ours / other:.2f} times plain PyTorch; {REPORT}"
    yield judged(
        "speed, plain PyTorch's expected", ours, "tokens/s", other, ours >= other if gpus else None, slower
    )
    yield Row("MFU, beside plain PyTorch's", utilization * ours, "%", utilization * other)
    yield Row("loss, beside plain PyTorch's", found["fivefold"]["loss"], "", found["plain"]["loss"])
    yield _step_time(plan.tokens / ours, plan, known)


def _train_rank(recipe: Recipe, file: Path, ranks: Ranks) -> None:
    """Turns of both on one rank; the first writes."""
    shape, device = (recipe.train.microbatch_size or 1, recipe.model.seq_len), ranks.device
    seeded = torch.Generator().manual_seed(ranks.rank)
    tokens = torch.randint(recipe.model.vocab_size or 2, shape, generator=seeded).to(device)
    state, batch = build_state(recipe, ranks), [Microbatch(tokens, tokens)]
    dtype, everybody = torch_dtype(compute_mode(recipe, device).working), everyone(ranks)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    sides: dict[str, Callable[[], Any]] = {
        "fivefold": lambda: take_step(state, recipe, batch),
        "plain": plain_step(recipe, ranks, dtype, tokens),
    }
    found: dict[str, dict[str, Any]] = {side: {"seconds": []} for side in sides}
    for step in sides.values():
        for _ in range(WARM_UP):
            step()
    for turn in range(TURNS):
        for side in sorted(sides, reverse=turn % 2 > 0):
            wait()
            everybody.barrier()
            began = time.perf_counter()
            losses = [sides[side]() for _ in range(STEPS)]
            wait()
            found[side]["seconds"].append((time.perf_counter() - began) / STEPS)
            found[side]["loss"] = float(getattr(losses[-1], "loss", losses[-1]))
    state.parallel.close()
    if ranks.first:
        write(file, json.dumps(found))


def _step_time(seconds: float, plan: Plan, known: bool) -> Row:
    times = seconds / plan.step.seconds
    advice = f"{times:.2f} times the plan; `fivefold train --set observe.profile_steps=1` shows where"
    return judged("step, planned", seconds, "s", plan.step.seconds if known else None, times <= TIME, advice)


def _prices(gpus: int) -> tuple[Cluster, Software, bool]:
    """(this machine or what stands in for it, the program on it, whether its times are those of this machine)."""
    gpu = torch.cuda.get_device_name() if gpus else ""
    (cluster, software), sheet = priced_here(gpu), sheet_of(gpu)
    known = sheet is not None and sheet.name == cluster.name
    return replace(cluster, devices=0, per_node=max(gpus, cluster.per_node)), software, known


def _fitting(gpus: int, shape: str, layouts: Sequence[str], copies: int) -> tuple[Recipe, Plan, bool]:
    """(recipe, plan, whether its times are known) with the first layout and the largest microbatch of which `copies`
    fit into the free memory.

    Raises:
        UserError: none fits.
    """
    cluster, software, known = _prices(gpus)
    free = torch.cuda.mem_get_info()[0] if gpus else (available() or 2**62) // (gpus or ON_CPU)
    needed = 0
    for layout in layouts:
        recipe = recipe_of(shape, layout, gpus)
        dp = Layout.from_recipe(recipe.layout).dp
        for size in (16, 8, 4, 2, 1):
            sets = [f"train.microbatch_size={size}", f"train.global_batch_size={dp * size}"]
            sized = resolved(change(recipe, sets))
            plan = predict(sized, cluster, software)
            needed = copies * plan.peak_bytes
            if needed <= MARGIN * free:
                return sized, plan, known
    raise UserError(f"{shape}, {layouts[-1]}: needs {size_text(needed)} per rank; {size_text(free)} are free")


def _of_ranks(work: Callable[[Path, Ranks], None], ranks: int) -> dict[str, Any]:
    """What the first of so many ranks writes."""
    with tempfile.TemporaryDirectory(prefix="fivefold-") as folder:
        file = Path(folder, "found.json")
        start_ranks(partial(work, file), ranks, fork=True)
        return read_json(file)


TRIALS = {
    "doctor": doctor, "links": links, "kernels": kernels, "verify": verify, "memory": memory, "train": train,
}  # fmt: skip


def main(part: str, name: str, file: Path) -> None:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        answer: dict[str, Any] = {"rows": [row._asdict() for row in TRIALS[part](gpus, name)]}
    except UserError as error:
        answer = {"why": str(error)}
    write(file, json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
