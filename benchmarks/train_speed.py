"""Training speed and memory on the common work: Fivefold beside plain PyTorch and the machine's own limit.

    python benchmarks/train_speed.py [--rounds 3] [--steps 20] [--compiled] [--out benchmarks/results/train_speed.json]

The common work is a Llama with 13.8M parameters (V 4096, D 384, 6 layers, 6 heads, ffn 1024, T 256), trained by AdamW
on 16 sequences of random tokens per step. Each variant runs in a process of its own. The variants take turns, and
ratios are taken within a round, so that drifting machine speed cancels out. The limit is the rate of square matmuls in
the same round. Compile time and the first steps do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

V, D, L, H, F, T, B = 4096, 384, 6, 6, 1024, 256, 16
WARM_UP = 4
FLOPS_PER_TOKEN = (
    6 * (L * (4 * D * D + 3 * D * F) + V * D) + 6 * L * T * D
)  # causal attention: half of 12 L T D

VARIANTS = ["fivefold bf16", "plain bf16 autocast", "fivefold fp32", "plain fp32", "fivefold bf16 dp=2"]
DEFAULTS = "default allocator"  # plain PyTorch as it comes
COMPILED = ["plain bf16 autocast compiled", "plain all bf16 compiled"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--microbatch", type=int, default=8)
    parser.add_argument(
        "--compiled", action="store_true", help="plain PyTorch with torch.compile, too (slow to start)"
    )
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return print(json.dumps(work(args.worker, args.steps, args.microbatch)))
    variants = args.only or VARIANTS + (COMPILED if args.compiled else [])
    rounds = []
    for number in range(args.rounds):
        row: dict[str, Any] = {"matmul bf16": matmul("bf16"), "matmul fp32": matmul("fp32")}
        for name in variants:
            row[name] = apart(name, args.steps, args.microbatch)
            print(
                f"round {number + 1}  {name:28} {row[name]['tokens_per_s']:7,.0f} tok/s",
                file=sys.stderr,
                flush=True,
            )
        rounds.append(row)
    summary = summarize(rounds, variants)
    print(table(summary))
    if args.out:
        from fivefold.host.machine import describe

        result = {
            "work": {"V": V, "D": D, "L": L, "H": H, "F": F, "T": T, "B": B, "microbatch": args.microbatch}
        }
        args.out.write_text(
            json.dumps(result | {"machine": describe(), "summary": summary, "rounds": rounds}, indent=1)
            + "\n"
        )


def matmul(dtype: str) -> float:
    """FLOP/s of square matmuls on all cores, measured now."""
    from fivefold.train.peak import measure_apart

    return measure_apart(dtype, len(os.sched_getaffinity(0)))["rate"]


def apart(name: str, steps: int, microbatch: int, checkout: Path | None = None) -> dict[str, Any]:
    """Runs a variant in processes of its own: ranks that meet in a file, else one.

    checkout: another checkout of this repository, whose program runs; None: this one.
    """
    command = [
        sys.executable,
        str(checkout / "benchmarks" / Path(__file__).name) if checkout else __file__,
        "--worker",
        name,
        "--steps",
        str(steps),
        "--microbatch",
        str(microbatch),
    ]
    cores = len(os.sched_getaffinity(0))
    world = ranks_of(name)
    from fivefold.host.machine import (
        TUNED,  # as `fivefold train` sets them; for tuned plain PyTorch, too
    )
    from fivefold.launch.ranks import STORE_FILE

    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, cores // world)), "GLOO_SOCKET_IFNAME": "lo"}
    if DEFAULTS not in name:
        environment |= TUNED
    if checkout:
        environment["PYTHONPATH"] = str(checkout / "src")
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(world):
            launched = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
            env = environment | (launched | {STORE_FILE: f"{folder}/store"} if world > 1 else {})
            processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{name} failed")
    results = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {
        "tokens_per_s": B * T / max(r["step_s"] for r in results),
        "peak_mib": max(r["peak_mib"] for r in results),
    }


def ranks_of(name: str) -> int:
    """Ranks of a variant: "fivefold bf16 tp=2" has its layout behind the dtype."""
    from fivefold.sharding.layout import Layout, parse

    layout = name.split()[2:] if name.startswith("fivefold") else []
    return Layout(**parse(layout[0])).ranks if layout else 1  # type: ignore[arg-type]


def work(name: str, steps: int, microbatch: int) -> dict[str, float]:
    step = fivefold_step(name, microbatch) if name.startswith("fivefold") else plain_step(name, microbatch)
    seconds = []
    for index in range(WARM_UP + steps):
        began = time.perf_counter()
        step(index)
        seconds.append(time.perf_counter() - began)
    getattr(step, "leave", lambda: None)()
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
    return {"step_s": median(seconds[WARM_UP:]), "peak_mib": round(peak)}


def random_batches(rows: int):
    import torch

    generator = torch.Generator().manual_seed(0)
    return [torch.randint(V, (rows, T), generator=generator) for _ in range(2)]


class RandomBatches:
    """Two tensors of random tokens, the same for every batch."""

    def batch(self, i: int, rows: range):
        inputs, targets = random_batches(B)
        return inputs[rows.start : rows.stop], targets[rows.start : rows.stop]


def fivefold_step(name: str, microbatch: int):
    """The trainer's own step: forward, backward, gradient sum, clipping, update."""
    from fivefold.host.machine import keep_freed_memory
    from fivefold.launch import ranks as ranks_
    from fivefold.recipe import load, resolve
    from fivefold.step.state import build_state
    from fivefold.step.step import take_step
    from fivefold.train.share import share_of

    keep_freed_memory()
    sets = [
        f"model.layers={L}",
        f"model.dim={D}",
        f"model.heads={H}",
        f"model.ffn_dim={F}",
        f"model.seq_len={T}",
    ]
    sets += ["train.steps=1000", f"train.global_batch_size={B}", f"precision.mode={name.split()[1]}"]
    joined = ranks_.join()
    ranks = joined.__enter__()
    layout = (name.split()[2:] or ["dp=1"])[0]
    sets += [f"train.microbatch_size={microbatch}"]
    recipe = resolve(load("quickstart", sets, layout), vocab_size=V)
    state = build_state(recipe, ranks)
    microbatches = share_of(RandomBatches(), 0, B, microbatch, state.mesh)

    def step(index: int) -> None:
        take_step(state, recipe, microbatches)

    step.leave = lambda: joined.__exit__(None, None, None)  # type: ignore[attr-defined]
    return step


def plain_step(name: str, microbatch: int):
    import torch
    from plain import PlainLlama

    from fivefold.host.machine import keep_freed_memory

    if DEFAULTS not in name:
        keep_freed_memory()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = PlainLlama(V, D, L, H, F, T)
    if "all bf16" in name:
        model = model.bfloat16()
    if "compiled" in name:
        model.compile()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    inputs, targets = random_batches(B)
    parts = list(zip(inputs.split(microbatch), targets.split(microbatch), strict=True))

    def step(index: int) -> None:
        for x, y in parts:
            with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in name):
                loss = model(x, y)
            (loss / len(parts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def summarize(rounds: list[dict[str, Any]], variants: list[str]) -> dict[str, dict[str, float]]:
    """Medians over rounds; the share of the matmul limit is taken within each round."""
    found = {}
    for name in variants:
        limit = "matmul fp32" if "fp32" in name else "matmul bf16"
        speeds = [r[name]["tokens_per_s"] for r in rounds]
        found[name] = {
            "tokens_per_s": median(speeds),
            "share_of_matmul_rate": median(
                s * FLOPS_PER_TOKEN / r[limit] for s, r in zip(speeds, rounds, strict=True)
            ),
            "peak_mib": max(r[name]["peak_mib"] for r in rounds),
        }
        for other in variants:
            if name.startswith("fivefold") and other != name:
                found[name][f"x {other}"] = median(
                    s / r[other]["tokens_per_s"] for s, r in zip(speeds, rounds, strict=True)
                )
    for dtype in ("bf16", "fp32"):
        found[f"matmul {dtype}"] = {"gflop_per_s": median(r[f"matmul {dtype}"] for r in rounds) / 1e9}
    return found


def table(summary: dict[str, dict[str, float]]) -> str:
    lines = [f"{'':30} {'tok/s':>8} {'of limit':>9} {'peak MiB':>9}   ratios"]
    for name, figures in summary.items():
        if name.startswith("matmul"):
            lines.append(f"{name:30} {figures['gflop_per_s']:8,.0f} GFLOP/s")
            continue
        ratios = "  ".join(f"{v:.2f} {k}" for k, v in figures.items() if k.startswith("x "))
        share = f"{100 * figures['share_of_matmul_rate']:8.1f}%"
        lines.append(
            f"{name:30} {figures['tokens_per_s']:8,.0f} {share} {figures['peak_mib']:9,.0f}   {ratios}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
