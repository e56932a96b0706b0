"""Seconds of a step on CPUs in the modes that round factors, with weights rounded once per step and in each matmul.

    OMP_NUM_THREADS=1 python benchmarks/precision_speed.py --out benchmarks/results/precision_speed.json

One process has both and steps them by turns, so what slows one slows the other. The medians of their steps and their
ratio are kept, and whether both end with the same weights, bit for bit. A row of bf16, which rounds nothing, stands
beside them. Four blocks 512 wide; 4 microbatches of 2 x 128 tokens per step.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fivefold.data import prepare
from fivefold.kernels.rounded import forget
from fivefold.parallel.data import DataParallel
from fivefold.recipe import load, resolve
from fivefold.step.state import State, build_state
from fivefold.step.step import take_step
from fivefold.train.share import batches_of, share_of
from fivefold.train.verify import alone

SHAPE = [
    "model.layers=4", "model.dim=512", "model.heads=8", "model.kv_heads=8", "model.ffn_dim=1536", "model.seq_len=128",
    "train.global_batch_size=8", "train.microbatch_size=2", "data.tokenizer=bytes",
]  # fmt: skip
EXPERTS = ["model.arch=moe", "model.experts=8", "model.experts_per_token=2", "model.expert_ffn_dim=512"]
MODES = [["bf16"], ["fp8"], ["fp8", "precision.fp8_scaling=row"], ["mxfp8"]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("precision_speed.json"))
    args = parser.parse_args()
    found: dict[str, Any] = {"threads": torch.get_num_threads(), "steps": args.steps, "rows": {}}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text("".join(f"{i} squared is {i * i}, and the next one follows. " for i in range(2000)))
        sets = [*SHAPE, f"data.source={text}", f"data.cache={Path(folder, 'cache')}"]
        for kind, more in (("llama", []), ("experts", EXPERTS)):
            for mode, *fields in MODES:
                name = " ".join([kind, mode, *fields])
                found["rows"][name] = timed([*sets, *more, f"precision.mode={mode}", *fields], args.steps)
                print(name, found["rows"][name], flush=True)
                args.out.write_text(json.dumps(found, indent=1) + "\n")


def timed(sets: list[str], steps: int) -> dict[str, Any]:
    """Steps of one recipe both ways, by turns."""
    recipe = load("quickstart", sets, "dp=1")
    data = prepare(recipe)
    recipe = resolve(recipe, vocab_size=data.vocab_size)
    batches, once, each = batches_of(recipe, data), *(build_state(recipe, alone()) for _ in range(2))
    in_each_matmul(each)
    seconds: dict[str, list[float]] = {"once": [], "each": []}
    for step in range(steps):
        for name, state in (("once", once), ("each", each)):
            share = share_of(batches, step, 8, 2, state.mesh)
            began = time.perf_counter()
            take_step(state, recipe, share)
            seconds[name].append(time.perf_counter() - began)
    kept, anew = (median(seconds[name][1:]) for name in ("once", "each"))  # the first one warms up
    pairs = zip(once.masters().values(), each.masters().values(), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    return {"once_s": round(kept, 4), "each_s": round(anew, 4), "ratio": round(kept / anew, 3), "same": same}


def in_each_matmul(state: State) -> None:
    """Lets every matmul round its own factors."""
    for replica in state.parallel.replicas:
        assert isinstance(replica, DataParallel)
        for layer in replica.layers.values():
            forget(layer)
        replica.layers.clear()
        replica.refresh()


if __name__ == "__main__":
    main()
