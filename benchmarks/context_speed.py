"""Context parallelism on 2 ranks of one thread against one process of 2 threads: speed and peak memory.

    python benchmarks/context_speed.py [--rounds 3] [--steps 6] [--out benchmarks/results/context_speed.json]

Llama of 13.8M parameters (V 4096, D 384, 6 layers, 6 heads, ffn 1024) in bf16, 4,096 tokens a step: 16 sequences of
256, or 2 of 2,048. Variants take turns, round by round; ratios are taken within a round, of each variant's fastest
step there, since other work on the machine only ever adds time. Memory is the process's peak above what it had before
its first step. The processor time of all ranks beside that of one process says what context parallelism costs in work,
waiting not counted; it can be read on a busy machine, too.
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

V, D, L, H, F = 4096, 384, 6, 6, 1024
WORKS = {"T 256": (256, 16, 8), "T 2048": (2048, 2, 1)}  # tokens of a sequence, sequences a step, microbatch
LAYOUTS = ["dp=1", "dp=2", "cp=2", "cp=2,cp_method=ulysses"]
WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layouts", nargs="*", default=LAYOUTS)
    parser.add_argument("--works", nargs="*", default=list(WORKS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return print(json.dumps(measure(args.worker[0], args.worker[1], args.steps)))
    rounds: list[dict[str, Any]] = []
    for _ in range(args.rounds):
        rounds.append({w: {name: apart(w, name, args.steps) for name in args.layouts} for w in args.works})
    summary = summarize(rounds)
    for work, row in summary.items():
        for layout, figures in row.items():
            print(
                f"{work:8} {layout:24} {figures['tokens_per_s']:7,.0f} tok/s  {figures['ratio']:5.2f} of one process"
                f" ({figures['work']:4.2f} x its work)  {figures['memory_mib']:6,.0f} MiB a rank"
            )
    if args.out:
        from fivefold.host.machine import describe

        args.out.write_text(
            json.dumps({"machine": describe(), "summary": summary, "rounds": rounds}, indent=1) + "\n"
        )


def apart(work: str, layout: str, steps: int) -> dict[str, float]:
    """One variant in processes of its own, which meet in a file."""
    world = 2 if "=2" in layout else 1
    command = [sys.executable, __file__, "--steps", str(steps), "--worker", work, layout]
    with tempfile.TemporaryDirectory() as folder:
        shared = {"OMP_NUM_THREADS": str(2 // world), "GLOO_SOCKET_IFNAME": "lo"}
        shared |= {"WORLD_SIZE": str(world), "FIVEFOLD_STORE_FILE": f"{folder}/store"}
        ranks = [
            subprocess.Popen(
                command,
                env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        answers = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{layout} failed")
    found = [json.loads(answer.splitlines()[-1]) for answer in answers]
    T, rows, _ = WORKS[work]
    return {
        "tokens_per_s": T * rows / max(f["step_s"] for f in found),
        "memory_mib": max(f["memory_mib"] for f in found),
        "processor_s": sum(f["processor_s"] for f in found),
    }


def measure(work: str, layout: str, steps: int) -> dict[str, float]:
    """A rank's part: its fastest step, in seconds, and the growth of its peak memory, in MiB."""
    import torch

    from fivefold.host.machine import keep_freed_memory
    from fivefold.launch import ranks as ranks_
    from fivefold.recipe import load, resolve
    from fivefold.step.state import build_state
    from fivefold.step.step import take_step
    from fivefold.train.share import share_of

    class Random:
        def batch(self, i: int, rows: range):
            tokens = torch.randint(V, (len(rows), T + 1), generator=torch.Generator().manual_seed(rows.start))
            return tokens[:, :-1], tokens[:, 1:]

    keep_freed_memory()
    T, rows, microbatch = WORKS[work]
    sizes = {"layers": L, "dim": D, "heads": H, "ffn_dim": F, "seq_len": T}
    sets = [f"model.{key}={value}" for key, value in sizes.items()]
    sets += ["train.steps=1000", f"train.global_batch_size={rows}", "precision.mode=bf16"]
    sets.append(f"train.microbatch_size={microbatch}")
    recipe = resolve(load("quickstart", sets, layout), vocab_size=V)
    with ranks_.join() as ranks:
        state = build_state(recipe, ranks)
        batch = share_of(Random(), 0, rows, microbatch, state.mesh)
        before, seconds, processor = peak_mib(), [], []
        for _ in range(WARM_UP + steps):
            began, used = time.perf_counter(), time.process_time()
            take_step(state, recipe, batch)
            seconds.append(time.perf_counter() - began)
            processor.append(time.process_time() - used)
        fastest = {"step_s": min(seconds[WARM_UP:]), "processor_s": min(processor[WARM_UP:])}
        return fastest | {"memory_mib": peak_mib() - before}


def peak_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def summarize(rounds: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Medians over the rounds; ratio: tokens/s by those of the first layout in the same round."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for work, row in rounds[0].items():
        first = next(iter(row))
        for layout in row:
            cells = [(r[work][layout], r[work][first]) for r in rounds]
            found.setdefault(work, {})[layout] = {
                "tokens_per_s": median(cell["tokens_per_s"] for cell, _ in cells),
                "ratio": median(cell["tokens_per_s"] / one["tokens_per_s"] for cell, one in cells),
                "work": median(cell["processor_s"] / one["processor_s"] for cell, one in cells),
                "memory_mib": median(cell["memory_mib"] for cell, _ in cells),
            }
    return found


if __name__ == "__main__":
    main()
