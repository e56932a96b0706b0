"""Seconds to search all valid layouts on two cores, with the bottlenecks of the best one.

    python benchmarks/planner/search_speed.py [--out benchmarks/results/planner_search.json]

Processor time of `fivefold.plan.search.search.search` for the ten best, and time by the clock; the import of the
planner does not count. Each case has a process of its own, whose memory is printed, too.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from fivefold.plan.cluster.clusters import parse
from fivefold.plan.search.search import search
from fivefold.recipe import Recipe, change, load
from fivefold.sharding.layout import to_text

LLAMA_405B = [
    "model.dim=16384", "model.layers=126", "model.heads=128", "model.kv_heads=8", "model.ffn_dim=53248",
    "model.vocab_size=128256", "model.seq_len=8192", "train.global_batch_size=16384",
]  # fmt: skip


def cases() -> dict[str, tuple[Recipe, str]]:
    seven = load("llama-7b", ["train.microbatch_size=none"], "dp=1")
    eight = load("mixtral-8x7b", ["train.microbatch_size=none"], "dp=1")
    return {
        "llama 7B": (seven, "h100:64"),
        "llama 7B, batch of 16384": (change(seven, ["train.global_batch_size=16384"]), "h100:16384"),
        "llama 405B": (change(seven, LLAMA_405B), "h100:16384"),
        "llama 405B, 32768 tokens": (change(seven, [*LLAMA_405B, "model.seq_len=32768"]), "h100:16384"),
        "llama 405B, 131072 tokens": (change(seven, [*LLAMA_405B, "model.seq_len=131072"]), "h100:16384"),
        "mixtral 8x7B": (change(eight, ["train.global_batch_size=8192"]), "h100:8192"),
        "mixtral 8x7B, batch of 16384": (change(eight, ["train.global_batch_size=16384"]), "h100:16384"),
        "deepseek-v3": (load("deepseek-v3", ["train.microbatch_size=none"], "dp=1"), "h100:2048"),
        "llama 405B, batch of 2048": (
            change(seven, [*LLAMA_405B, "train.global_batch_size=2048"]),
            "h100:16384",
        ),
        "llama 405B, nothing fits": (change(seven, LLAMA_405B), "h100:64"),
    }


def alone(name: str) -> dict[str, Any]:
    """Searches a case. seconds: of processor time, of all its processes. mb: the most memory of this process, and of
    each that it starts as much as the largest one takes, in MB of 1e6 bytes."""
    recipe, cluster = cases()[name]
    start, clock = time.process_time(), time.perf_counter()
    result = search(recipe, parse(cluster))
    seconds, wall = time.process_time() - start, time.perf_counter() - clock
    halves = len(active_children())
    best = result.plans[0] if result.plans else None
    layout = f"{to_text(best.layout)} with microbatches of {best.setting.sizes.B}" if best else "none"
    found = {
        "model": name, "cluster": cluster, "layouts": result.considered,
        "wall_seconds": round(wall, 2), "best": layout, "mfu": round(best.mfu, 4) if best else 0.0,
        "binding": [result.nothing] * bool(result.nothing) + result.bottlenecks,
    }  # fmt: skip
    del result, best  # with which its processes end, and their times and sizes are known
    own, others = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    largest = own.ru_maxrss + halves * others.ru_maxrss
    spent = seconds + others.ru_utime + others.ru_stime
    return found | {"seconds": round(spent, 2), "mb": round(largest * 1024 / 1e6)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = []
    print(f"{'model':28} {'cluster':12} {'layouts':>11} {'seconds':>8} {'wall':>8} {'MB':>6}  best")
    for name in cases():
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            one = process.submit(alone, name).result()
        print(
            f"{name:28} {one['cluster']:12} {one['layouts']:11,} {one['seconds']:8.2f} {one['wall_seconds']:8.2f} "
            f"{one['mb']:6}  {one['best']}, MFU {100 * one['mfu']:.1f}%"
        )
        print("\n".join(f"  {text}" for text in one["binding"]))
        found.append(one)
    if args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
