"""Memory that recomputation saves, and time that it costs: on the common work, and with plain attention at T 2048.

    python benchmarks/recompute_memory.py [--microbatch 8] [--steps 6] [--out benchmarks/results/recompute_memory.json]

The common work: Llama of 13.8M parameters (V 4096, D 384, 6 layers, 6 heads, ffn 1024, T 256), forward and backward in
bf16, one process. Plain attention (`--plain`): GPT-2 with 2 layers of this width and 12 heads, 2048 tokens, and
PyTorch's attention of separate operations, which keeps its probabilities, as in arXiv 2205.05198.

Activations: bytes of the tensors made in forward that are alive before backward. Peak: the most resident memory of the
process, less that before the first step; gradients (27.6 MB in bf16 on the common work) and workspace are in it.
Seconds: processor time of the median step, of all threads together. The variants take turns, each in a process of its
own; ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fivefold.host.machine import keep_freed_memory, peak_memory_bytes, resident_bytes
from fivefold.kernels import blockwise_attention
from fivefold.models.base import LanguageModel, build
from fivefold.parallel import recompute
from fivefold.recipe import load, resolve
from fivefold_plan.trace.memory import Tracker

VARIANTS = ("none", "selective", "ops:attention+gate", "ops:attention+gate+norm", "full")
WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--microbatch", type=int, default=8, help="sequences computed at once")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mode", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--plain", action="store_true", help="plain attention at T 2048")
    parser.add_argument("--only", nargs="*", default=VARIANTS, help="modes, of those in this file")
    parser.add_argument("--out", type=Path, help="results are added to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return print(json.dumps(work(args.worker, args.microbatch, args.steps, args.mode, args.plain)))
    rows: dict[str, list[dict[str, Any]]] = {how: [] for how in args.only}
    for _ in range(args.rounds):
        for how in args.only:
            command = [sys.executable, __file__, "--worker", how, "--mode", args.mode]
            command += ["--microbatch", str(args.microbatch), "--steps", str(args.steps)]
            command += ["--plain"] * args.plain
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows[how].append(json.loads(done.stdout))
    result: dict[str, Any] = {"microbatch": args.microbatch, "mode": args.mode}
    for how, found in rows.items():
        ratios = [a["seconds"] / b["seconds"] for a, b in zip(found, rows["none"], strict=True)]
        result[how] = {
            "activation_bytes": found[0]["activation_bytes"],
            "peak_bytes": median(row["peak_bytes"] for row in found),
            "seconds": median(row["seconds"] for row in found),
            "seconds_by_none": median(ratios),
            "activation_share": found[0]["activation_bytes"] / rows["none"][0]["activation_bytes"],
        }
        print(
            f"{how:24} activations {result[how]['activation_bytes'] / 2**20:7.1f} MiB "
            f"({result[how]['activation_share']:.2f} of none), peak {result[how]['peak_bytes'] / 2**20:7.1f} MiB, "
            f"{result[how]['seconds_by_none']:.2f} times none's time"
        )
    if args.out:
        before = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
        found = before | {"plain attention, T 2048" if args.plain else "common work": result}
        args.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


COMMON = ["layers=6", "dim=384", "heads=6", "ffn_dim=1024", "seq_len=256", "vocab_size=4096"]
PLAIN = ["arch=gpt2", "layers=2", "dim=384", "heads=12", "kv_heads=12", "ffn_dim=1536", "seq_len=2048"]


def work(how: str, microbatch: int, steps: int, mode: str, plain: bool) -> dict[str, Any]:
    """One variant: bytes and seconds of forward and backward."""
    if not plain:
        return measured(how, COMMON, microbatch, steps, mode)
    blockwise_attention.native.usable = lambda *tensors: False
    with sdpa_kernel(SDPBackend.MATH):
        return measured(how, [*PLAIN, "vocab_size=4096"], microbatch, steps, mode)


def measured(how: str, sizes: list[str], microbatch: int, steps: int, mode: str) -> dict[str, Any]:
    keep_freed_memory()
    recipe = resolve(
        load("quickstart", [f"model.{size}" for size in sizes] + ["model.tie_embeddings=false"], "dp=1"),
        vocab_size=4096,
    )
    module = build(recipe.model, device="cpu", seed=0)
    assert isinstance(module, LanguageModel)
    module.to(torch.bfloat16 if mode == "bf16" else torch.float32)
    recompute.apply(module, [how] * len(module.blocks))
    shape = microbatch, recipe.model.seq_len
    tokens = torch.randint(0, 4096, shape, generator=torch.Generator().manual_seed(0))
    before, times = resident_bytes()[0], []
    for step in range(WARM_UP + steps):
        module.zero_grad(set_to_none=False)
        began = time.process_time()
        module(tokens, tokens).backward()
        if step >= WARM_UP:
            times.append(time.process_time() - began)
    peak = peak_memory_bytes() - before
    with Tracker() as tracker:
        loss = module(tokens, tokens)
        kept = tracker.made()
    loss.backward()
    return {"activation_bytes": kept, "peak_bytes": peak, "seconds": median(times)}


if __name__ == "__main__":
    main()
