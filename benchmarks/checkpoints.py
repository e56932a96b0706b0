"""Seconds that a step waits for a checkpoint, written at once and beside the steps, and seconds to load one.

    python benchmarks/checkpoints.py [--layers 12] [--saves 5] [--out benchmarks/results/checkpoints.json]

One rank trains a Llama of about 51M parameters (612 MB of weights and moments). In turns its state is saved at once and
beside the steps. What a step waits is counted in the trainer's own calls: `Saver.save`, `begin_update`, `begin_step`.
Beside the steps, hashing and writing share the processor with training, so the steps under which a save is written are
timed, too. Loading is timed beside `torch.load` of the same tensors in one file, page cache warm, and copied into the
state.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fivefold.checkpoint import store
from fivefold.host import cores
from fivefold.host.machine import describe
from fivefold.launch.ranks import Ranks
from fivefold.parallel.mesh import Microbatch
from fivefold.recipe import count_parameters, load, resolve
from fivefold.step.state import State, build_state
from fivefold.step.step import take_step
from fivefold.train.job import Job
from fivefold.train.resume import load_checkpoint
from fivefold.train.saver import Saver


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(cores())
    sets = [f"model.layers={args.layers}", "model.dim=512", "model.heads=8", "model.kv_heads=8"]
    sets += ["model.ffn_dim=1536", "model.seq_len=256", "train.global_batch_size=4", "train.steps=100000"]
    sets += ["train.microbatch_size=4", "layout.dp_replicate=1", "checkpoint.keep_last=1"]
    recipe = resolve(load("quickstart", sets), vocab_size=16384)
    state = build_state(recipe, Ranks(0, 1, 0, 1, torch.device("cpu")))
    tokens = torch.randint(16384, (4, 256))

    def step(saver: Saver | None = None) -> float:
        """Seconds of a step."""
        began = time.perf_counter()
        if saver is not None:
            saver.begin_step(state, [])
        inspect = (lambda: saver.begin_update(state)) if saver is not None else dict
        done = take_step(state, recipe, [Microbatch(tokens, tokens)], inspect=inspect)
        done.wait()
        if saver is not None:
            saver.figures(done.more)
        return time.perf_counter() - began

    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        usual = [step() for _ in range(5)][2:]
        found = saves(state, Job(recipe, Path(folder)), step, args.saves)
        found["step_s"] = median(usual)
        found |= loading(state, Path(folder), args.saves)
    found |= {"parameters": count_parameters(recipe.model), "bytes": found["bytes"]}
    found["stall_share"] = found["stall_s"] / found["synchronous_s"]
    found["load_ratio"] = found["load_s"] / found["torch_load_s"]
    for name, value in found.items():
        print(f"{name:20} {value:,.4f}" if isinstance(value, float) else f"{name:20} {value}")
    if args.out:
        command = f"python benchmarks/checkpoints.py --layers {args.layers} --saves {args.saves}"
        args.out.write_text(json.dumps({"command": command, **found, "machine": describe()}, indent=1) + "\n")


def saves(state: State, job: Job, step: Callable[..., float], count: int) -> dict[str, Any]:
    """Synchronous and asynchronous saves in turns."""

    def alarm(step: int, text: str) -> None:
        raise SystemExit(text)

    saver, waits, stalls, beside = Saver(state, job, alarm), [], [], []
    for _ in range(count):
        began = time.perf_counter()
        saver.save({}, ends=True)
        waits.append(time.perf_counter() - began)
        step(saver)
        before, began = saver.seconds, time.perf_counter()
        saver.save({}, ends=False)
        called = time.perf_counter() - began
        assert saver.under_way is not None, "there is memory for a copy"
        under_way, seconds = saver.under_way, []
        while not under_way.ended.is_set():
            seconds.append(step(saver))
        beside.append(median(seconds))
        stalls.append(called + saver.seconds - before)
        step(saver)
        saver.settle()
    return {
        "synchronous_s": median(waits),
        "stall_s": median(stalls),
        "step_beside_a_save_s": median(beside),
        "bytes": store.Reader(store.latest(job.out)).manifest.bytes,
    }


def loading(state: State, folder: Path, count: int) -> dict[str, Any]:
    """`load_checkpoint` beside `torch.load`, in turns."""
    newest, one = store.latest(folder), folder / "one.pt"
    tensors = state.masters() | state.moments()
    torch.save(tensors, one)
    ours, theirs, alone = [], [], []
    for _ in range(count):
        began = time.perf_counter()
        load_checkpoint(state, store.Reader(newest))
        ours.append(time.perf_counter() - began)
        began = time.perf_counter()
        loaded = torch.load(one, weights_only=True)
        alone.append(time.perf_counter() - began)
        for name, tensor in tensors.items():
            tensor.copy_(loaded[name])
        theirs.append(time.perf_counter() - began)
        del loaded
    return {
        "load_s": median(ours),
        "torch_load_s": median(theirs),
        "torch_load_alone_s": median(alone),
    }


if __name__ == "__main__":
    main()
