"""Seconds of `fivefold plan search`, as users type it, with the bottlenecks of the best layout.

    python benchmarks/planner/search_speed.py [--out benchmarks/results/planner_search.json]

Processor time of the whole command for the ten best, start included, and time by the clock. The memory is that of its
largest process; a search that takes long has two more.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

from fivefold.recipe import Recipe, load

LLAMA_405B = (
    "llama-7b", "model.dim=16384", "model.layers=126", "model.heads=128", "model.kv_heads=8", "model.ffn_dim=53248",
    "model.vocab_size=128256", "model.seq_len=8192", "train.global_batch_size=16384",
)  # fmt: skip
CASES = {
    "llama 7B": (("llama-7b",), "h100:64"),
    "llama 7B, batch of 16384": (("llama-7b", "train.global_batch_size=16384"), "h100:16384"),
    "llama3-8b": (("llama3-8b",), "h100:64"),
    "llama3-405b": (("llama3-405b",), "h100:16384"),
    "llama 405B": (LLAMA_405B, "h100:16384"),
    "llama 405B, 32768 tokens": ((*LLAMA_405B, "model.seq_len=32768"), "h100:16384"),
    "llama 405B, 131072 tokens": ((*LLAMA_405B, "model.seq_len=131072"), "h100:16384"),
    "mixtral 8x7B": (("mixtral-8x7b", "train.global_batch_size=8192"), "h100:8192"),
    "mixtral 8x7B, batch of 16384": (("mixtral-8x7b", "train.global_batch_size=16384"), "h100:16384"),
    "deepseek-v3": (("deepseek-v3",), "h100:2048"),
    "llama 405B, nothing fits": (LLAMA_405B, "h100:64"),
}
"""(the recipe and what --set changes, the cluster) of each search."""


def cases() -> dict[str, tuple[Recipe, str]]:
    """The recipe that each command searches layouts of, and the cluster."""
    return {
        name: (load(recipe, ["train.microbatch_size=none", *sets], "dp=1"), cluster)
        for name, ((recipe, *sets), cluster) in CASES.items()
    }


def command(name: str) -> dict[str, Any]:
    """Runs the command of a case. seconds: of processor time, of all its processes. mb: the most memory of its largest
    process, in MB of 1e6 bytes. Raises RuntimeError: it fails."""
    (recipe, *sets), cluster = CASES[name]
    words = ["plan", "search", recipe, *(word for text in sets for word in ("--set", text))]
    clock = time.perf_counter()
    with Popen(
        [sys.executable, "-m", "fivefold", *words, "--cluster", cluster, "--json"], stdout=PIPE
    ) as process:
        assert process.stdout
        printed = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{name}: the command ended with {process.returncode}")
    found = json.loads(printed)
    best = found["plans"][0] if found["plans"] else None
    return {
        "model": name, "cluster": cluster, "layouts": found["considered"],
        "wall_seconds": round(time.perf_counter() - clock, 2),
        "best": f"{best['layout']} with microbatches of {best['microbatch_size']}" if best else "none",
        "mfu": round(best["mfu"], 4) if best else 0.0,
        "binding": [found["nothing"]] * bool(found["nothing"]) + found["binding"],
        "seconds": round(used.ru_utime + used.ru_stime, 2), "mb": round(used.ru_maxrss * 1024 / 1e6),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = []
    print(f"{'model':28} {'cluster':12} {'layouts':>11} {'seconds':>8} {'wall':>8} {'MB':>6}  best")
    for name in CASES:
        one = command(name)
        print(
            f"{name:28} {one['cluster']:12} {one['layouts']:11,} {one['seconds']:8.2f} {one['wall_seconds']:8.2f} "
            f"{one['mb']:6}  {one['best']}, MFU {100 * one['mfu']:.1f}%"
        )
        print("\n".join(f"  {text}" for text in one["binding"]), flush=True)
        found.append(one)
    if args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
