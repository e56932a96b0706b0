"""The parts of `fivefold bench gpu` and their trials. DIR/gpu.json and the page DIR/gpu.html are written after each.

A trial is a process of its own, `python -m fivefold_plan.bench.gpu.trials PART TRIAL`, which prints rows. So a crash,
a hang or no memory ends one trial, and its rows so far stay. What is in gpu.json is not run again; what failed or had
no time is. Without a GPU, two ranks on the CPU run at tiny sizes. That shows that the instrument works, but no speed.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile, gettempdir
from typing import Any, NamedTuple

import torch

from fivefold.errors import UserError, printable, shortened
from fivefold.files import make_folder, read_json, write_atomically
from fivefold.host import cores
from fivefold.host.devices import GIB
from fivefold.host.machine import available, describe, let_segments_grow, peak_memory_bytes
from fivefold.launch.local import returned
from fivefold.launch.ranks import Ranks
from fivefold.launch.verdict import USER, Interrupt, unsaved
from fivefold.models.section import known
from fivefold.observe.format import size as size_text
from fivefold.parallel.mesh import Microbatch
from fivefold.precision import MASTER, PRECISIONS
from fivefold.recipe import Recipe, flops_per_token, load
from fivefold.step.state import build_state, compute_mode
from fivefold.step.step import take_step
from fivefold.train.peak import device_peak
from fivefold_plan.bench import collectives
from fivefold_plan.bench.gpu.doctor import doctor
from fivefold_plan.bench.gpu.kernels import kernels
from fivefold_plan.bench.gpu.plain import plain, random_tokens, seconds_per_step
from fivefold_plan.bench.gpu.report import Row, line, page, rows
from fivefold_plan.cluster.devices import Cluster
from fivefold_plan.messages.communication import Group, collective, send
from fivefold_plan.predict import Plan, predict, priced_here, resolved
from fivefold_plan.setting import Software

JSON, HTML = "gpu.json", "gpu.html"
LEAST_S = 5.0  # a trial's process alone takes some seconds to start
AGAIN, REPORT = "the same command again runs it", "please report it with gpu.json"
ON_CPU = 2  # ranks
CORES, MOST = 4, 4  # for each of several trials at once; of them
SIZES = {1 << 20: 20, 16 << 20: 10, 256 << 20: 5}  # bytes of a message: repetitions
LARGE = 16 << 20  # bytes from which a message shows its rate, not its latency
LINK, TIME, MEMORY = 0.8, 1.1, 0.05  # of the planned rate and time; error of the planned bytes
WHOLE = 12  # bytes per logit of plain PyTorch: in 16 bits, in fp32, and their softmax

LLAMA_1B = ("model.layers=16", "model.dim=2048", "model.ffn_dim=8192")
SHAPES = {"gpt2-124m": ("gpt2-124m", ()), "llama-1b": ("llama3-8b", LLAMA_1B), "llama3-8b": ("llama3-8b", ())}
"""Recipes, and what differs from them. The second is Llama 3.2's shape with an output layer of its own."""
TINY = (
    "model.layers=2", "model.dim=64", "model.heads=4", "model.kv_heads=4", "model.ffn_dim=256", "model.vocab_size=512",
    "model.seq_len=64",
)  # fmt: skip
LAYOUTS = {
    2: ("dp=2,zero=3", "tp=2,sp=true", "cp=2", "pp=2", "dp=2,ep=2", "dp=2", "dp=2,zero=1", "dp=2,zero=2", "tp=2",
        "cp=2,cp_method=ulysses", "cp=2,cp_method=all_gather", "pp=2,schedule=zbv,virtual_stages=2"),
    4: ("dp=2,tp=2,sp=true,zero=3", "pp=2,tp=2"),
    8: ("dp=2,tp=2,pp=2,zero=1", "dp_replicate=2,dp_shard=4,zero=3"),
}  # fmt: skip
"""By number of ranks. Two share a GPU where there is one."""
VERIFIED = ("data.tokenizer=bytes", "train.global_batch_size=8", "train.microbatch_size=2")
UNFUSED = "unfused"


def verify(gpus: int, name: str) -> Iterator[Row]:
    """name: layout, mode, and perhaps UNFUSED: without our kernels on CPUs, without compiled blocks on GPUs."""
    layout, mode, *unfused = name.split()
    recipe = "moe-tiny" if "ep=" in layout else "quickstart"
    words = f"verify {recipe} --layout {layout} --mode {mode} --share-gpus --json --set {' --set '.join(VERIFIED)}"
    command = [sys.executable, "-P", "-m", "fivefold", *words.split()]
    switched = {"FIVEFOLD_NATIVE": "0", "TORCH_COMPILE_DISABLE": "1"} if unfused else {}
    done = subprocess.run(command, env=os.environ | switched, stdout=subprocess.PIPE)
    if "error" in (found := json.loads(done.stdout)):
        raise (UserError if done.returncode == USER else RuntimeError)(found["error"]["message"])
    for kind, allowed in found["tolerance"].items():
        figure = found[kind]
        measured = "not finite" if figure["max_rel"] is None else figure["max_rel"]
        wrong = f"largest at {figure['worst']}; {REPORT}" * (not figure["passed"])
        yield Row(kind, measured, "", allowed, wrong)


def _verified(gpus: int) -> list[str]:
    """Layouts with modes, the most usual first."""
    alone = {mode: [f"dp=1 {mode}", f"dp=1 {mode} {UNFUSED}"] for mode in PRECISIONS}
    usual = alone.pop(MASTER) + alone.pop("bf16")
    if not gpus:
        return [*usual[:2], f"{LAYOUTS[2][0]} bf16", f"pp=2 {MASTER}"]
    several = [layout for ranks, some in LAYOUTS.items() if ranks <= max(2, gpus) for layout in some]
    both = ([f"{layout} {mode}" for layout in several] for mode in ("bf16", MASTER))
    return [*usual, *next(both), *chain(*alone.values()), *next(both)]


def links(gpus: int, name: str) -> Iterator[Row]:
    """Bytes of the whole message per second, of collectives over all devices."""
    if gpus == 1:
        raise UserError("one GPU sends nothing")
    cluster, n = _priced(gpus)[0], gpus or ON_CPU
    advice = "look at peer access, NVLink (nvidia-smi topo -m) and NCCL's log (NCCL_DEBUG=INFO)"
    sizes = {size: times for size, times in SIZES.items() if gpus or size <= LARGE}
    for what, points in returned(partial(_links, sizes), n, fork=True).items():
        kind = what.partition(" ")[0]
        if kind == "scatter_gradients":  # on GPUs it is the reduce-scatter
            continue
        for size, seconds in points:
            group = Group(n, n)
            planned = send(size, False, cluster) if kind == "send" else collective(kind, size, group, cluster)
            rate, expected = size / seconds / 1e9, size / planned / 1e9 if gpus and cluster.name else None
            short = advice * (size >= LARGE and rate < LINK * (expected or 0))
            yield Row(f"{what}, {size_text(size)}", rate, "GB/s", expected, short)


def _links(sizes: dict[int, int], ranks: Ranks) -> dict[str, list[list[float]]]:
    return collectives.links(ranks.device, sizes, after_computing=False)[0]


def operations(gpus: int, name: str) -> Iterator[Row]:
    """name: a shape and a dtype."""
    shape, dtype = name.split()
    yield from kernels(recipe_of(shape, "dp=1", gpus).model, dtype, gpus)


def memory(gpus: int, name: str) -> Iterator[Row]:
    """name: a shape. Beside the plan."""
    recipe, plan = _fitting(gpus, name, zero=1)
    found, planned = returned(partial(_trained, recipe), plan.ranks, fork=True), plan.peak_bytes / GIB
    error, times = found["memory_bytes"] / plan.peak_bytes - 1, found["step_s"] / plan.step.seconds
    off = f"{100 * error:+.1f}% of the plan; {REPORT}" * (gpus > 0 and abs(error) > MEMORY)
    yield Row("memory", found["memory_bytes"] / GIB, "GiB", planned if gpus else None, off)
    listed = gpus > 0 and bool(plan.setting.cluster.name)
    slow = f"{times:.2f} times the plan; `fivefold train --set observe.profile_steps=1` shows where"
    expected = plan.step.seconds if listed else None
    yield Row("step", found["step_s"], "s", expected, slow * (listed and times > TIME))


def train(gpus: int, name: str) -> Iterator[Row]:
    """name: a shape. Beside plain PyTorch, one after the other, each with the memory to itself."""
    recipe, plan = _fitting(gpus, name, zero=3, whole=WHOLE)
    found = [returned(partial(work, recipe), plan.ranks, fork=True) for work in (_trained, plain)]
    ours, theirs = (plan.tokens / one["step_s"] for one in found)
    slower = f"{ours / theirs:.2f} times plain PyTorch; {REPORT}" * (gpus > 0 and ours < theirs)
    yield Row("speed, beside plain PyTorch's", ours, "tokens/s", theirs, slower)
    device = torch.device("cuda" if gpus else "cpu")
    peak = plan.ranks * device_peak(device.type, compute_mode(recipe, device).measured)
    utilization = 100 * flops_per_token(recipe.model) / peak
    yield Row("MFU, beside plain PyTorch's", utilization * ours, "%", utilization * theirs)


def _trained(recipe: Recipe, ranks: Ranks) -> dict[str, Any]:
    """step_s, memory_bytes of the trainer's own step on random tokens."""
    state, tokens = build_state(recipe, ranks), random_tokens(recipe, ranks)
    seconds = seconds_per_step(lambda: take_step(state, recipe, [Microbatch(tokens, tokens)]), ranks.device)
    state.parallel.close()
    return {"step_s": seconds, "memory_bytes": peak_memory_bytes(ranks.device.type)}


def recipe_of(shape: str, layout: str, gpus: int, size: int = 1) -> Recipe:
    """The resolved recipe of a shape, with one microbatch of `size` sequences in a step of each rank."""
    name, sets = SHAPES[shape]
    batch = f"train.microbatch_size={size}", f"train.global_batch_size={(gpus or ON_CPU) * size}"
    return resolved(load(name, [*sets, *(() if gpus else TINY), *batch], layout))


def _priced(gpus: int) -> tuple[Cluster, Software]:
    """This machine, or what stands in for it, without a name; the program on it."""
    cluster, software = priced_here(torch.cuda.get_device_name() if gpus else "")
    return replace(cluster, devices=0, per_node=max(gpus, cluster.per_node)), software


def _fitting(gpus: int, shape: str, zero: int, whole: int = 0) -> tuple[Recipe, Plan]:
    """A shape on all devices with the least recomputation and the largest microbatch that fit into the free memory.
    whole: bytes per logit that are needed besides. Raises UserError: none fits."""
    free = torch.cuda.mem_get_info()[0] if gpus else (available() or 2**62) // ON_CPU
    cluster, software = _priced(gpus)
    cluster = replace(cluster, device=replace(cluster.device, memory=free))
    layout, needed = f"dp={gpus or ON_CPU}" + f",zero={zero}" * (gpus != 1), 0
    for again, size in product(("none", "full"), (16, 8, 4, 2, 1)):
        recipe = recipe_of(shape, f"{layout},recompute={again}", gpus, size)
        plan = predict(recipe, cluster, software)
        needed = plan.peak_bytes + whole * size * recipe.model.seq_len * known(recipe.model.vocab_size)
        if needed <= plan.limit:
            return recipe, plan
    raise UserError(f"{shape}, {layout}: needs {size_text(needed)} per rank; {size_text(free)} are free")


class Part(NamedTuple):
    """share: of the time, relative to other parts. trials: their names, given the number of GPUs. run: what a trial of
    that name finds."""

    about: str
    share: float
    trials: Callable[[int], list[str]]
    run: Callable[[int, str], Iterator[Row]]


PARTS = {
    "doctor": Part("Drivers, libraries, settings and variables.", 1, lambda gpus: ["machine"], doctor),
    "links": Part("Collectives, beside the cluster's description.", 2, lambda gpus: ["collectives"], links),
    "kernels": Part(
        "Forward and backward of operations, beside the roofline and PyTorch's own.", 3,
        lambda gpus: [f"{shape} {dtype}" for shape in ("llama-1b", "llama3-8b") for dtype in ("bf16", MASTER)],
        operations,
    ),
    "verify": Part("Layouts, beside one process: relative differences, and what is allowed.", 9, _verified, verify),
    "memory": Part("Runs, beside their plans.", 5, lambda gpus: [*SHAPES], memory),
    "train": Part("Speed, beside plain PyTorch.", 8, lambda gpus: [*SHAPES], train),
}  # fmt: skip


def measure(out: Path, parts: Sequence[str], limit_s: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs the trials of these parts that are still open, until the limit; the whole report. say: gets lines. Raises
    UserError: `out` holds results of another machine, or of another version of Fivefold or PyTorch."""
    end, report = time.monotonic() + limit_s, {"machine": describe(), "parts": {part: {} for part in PARTS}}
    if (out / JSON).exists():
        new, report = report, read_json(out / JSON)
        if report.get("machine") != new["machine"] or report.get("parts", {}).keys() != new["parts"].keys():
            raise UserError(f"--out {out}: has results of another machine or version; choose another folder")
    make_folder(out)
    done, gpus = report["parts"], len(report["machine"]["gpus"])
    open_ = {p: [n for n in PARTS[p].trials(gpus) if "why" in done[p].get(n, ["why"])] for p in parts}
    waiting = {part: names for part, names in open_.items() if names}
    with Interrupt(noted=lambda number: sys.exit(unsaved(number))):
        while waiting:
            part, now = next(iter(waiting)), time.monotonic()
            until = now + (end - now) * PARTS[part].share / sum(PARTS[one].share for one in waiting)
            names = waiting.pop(part)
            for first in range(0, len(names), at_once := _at_once(part)):
                group, seconds = names[first : first + at_once], until - time.monotonic()
                why = {"rows": [], "why": f"no time within --limit; {AGAIN}"}
                late = ((name, done[part].get(name, why)) for name in group)
                with closing(_trials(part, group, seconds) if seconds >= LEAST_S else late) as results:
                    for name, found in results:
                        done[part][name] = found
                        write_atomically(out / JSON, json.dumps(report, indent=1) + "\n")
                        write_atomically(out / HTML, page(report, {p: PARTS[p].about for p in PARTS}))
                        say("\n  ".join([f"{part}: {name}", *map(line, rows(found))]))
    return report


def _at_once(part: str) -> int:
    """How many trials of a part run side by side. Those of `verify` are not timed, and mostly start and compile."""
    return min(MOST, max(1, cores() // CORES)) if part == "verify" else 1


def _trials(
    part: str, names: Sequence[str], seconds: float
) -> Generator[tuple[str, dict[str, Any]], None, None]:
    """Trials side by side, and of each its rows, and "why" it ended before all were there."""
    end = time.monotonic() + seconds
    with ExitStack() as stack:
        started = [(name, *_start(stack, part, name, len(names) > 1)) for name in names]
        for name, process, printed, said in started:
            why = ""
            try:
                if code := process.wait(max(0.0, end - time.monotonic())):
                    said.seek(0)
                    why = f"failed: {shortened(anonymous(said.read().strip()), 2000) or code}"
            except subprocess.TimeoutExpired:
                why = f"stopped after {seconds:.0f} s, its share of --limit; {AGAIN}"
            printed.seek(0)
            lines = [text for text in printed.read().splitlines() if text.startswith('{"name":')]
            yield name, {"rows": [json.loads(text) for text in lines]} | ({"why": why} if why else {})


def _start(stack: ExitStack, part: str, name: str, several: bool) -> tuple[subprocess.Popen[str], Any, Any]:
    """A trial's process, and files with what it has printed and said. `stack` kills it, and what it has started."""
    output = partial(TemporaryFile, "w+", errors="replace")
    printed, said = stack.enter_context(output()), stack.enter_context(output())
    folder = stack.enter_context(TemporaryDirectory(prefix="fivefold-"))
    # What a killed process leaves goes, too, but for what the next one need not compile again.
    compiled = f"{gettempdir()}/torchinductor_{os.getuid()}"
    environment = {"TORCHINDUCTOR_CACHE_DIR": compiled, **os.environ, "TMPDIR": folder}
    few = ("TORCHINDUCTOR_COMPILE_THREADS", "OMP_NUM_THREADS")
    environment |= dict.fromkeys(few, str(CORES)) if several else {}
    command = [sys.executable, "-P", "-m", "fivefold_plan.bench.gpu.trials", part, name]
    process = subprocess.Popen(
        command, stdout=printed, stderr=said, process_group=0, env=environment, text=True
    )

    def end() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    stack.callback(end)
    return process, printed, said


def anonymous(text: str) -> str:
    """Text that may be passed on: without the names of host, home and user."""
    names = {socket.gethostname(): "HOST", str(Path.home()): "~", getpass.getuser(): "USER"}
    for name, instead in names.items():
        text = re.sub(rf"\b{re.escape(name)}\b" if name.isalnum() else re.escape(name), instead, text)
    return printable(text)


def main(part: str, name: str) -> None:
    if part != "doctor":  # it shows the user's own variables
        let_segments_grow()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        for row in PARTS[part].run(gpus, name):
            print(json.dumps(row._asdict()), flush=True)
    except UserError as error:
        print(json.dumps(Row("not possible", anonymous(str(error)))._asdict()))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
