"""Measures what overlap saves where each rank of a mixture of experts, or of a tensor axis, is on a host of its own.

    python benchmarks/expert_overlap.py [--rate 1gbit] [--rounds 15] [--out benchmarks/results/expert_overlap.json]
    python benchmarks/expert_overlap.py --rate 200mbit --part dualpipev [--model model.ffn_dim=2048] [--name NAME]
    python benchmarks/expert_overlap.py --rate 400mbit --part tensor [--name NAME]

Parts: the all-to-alls of ep=2 in 1 to 8 chunks on two hosts; a pipeline on four hosts whose forwards and backwards run
in pairs, beside the same schedule without pairs; `dualpipev` and `dualpipe` on two hosts of two ranks, with pairs and
without. There the experts' rows travel between the hosts, and the pipeline stays inside of each. `tensor`, if asked
for: the linear layers of tp=2 with sp in 1 to 8 chunks, on two hosts. The hosts (`tests/namespaces.py`) share this
machine's cores. In each round every rank takes one step of each kind, in turn, and every second round in the opposite
order. Reported are medians of seconds, and of each round's ratio to the first kind. Where hosts cannot be made, the
script says so and ends with 0. Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from namespaces import Hosts, Unavailable  # pyright: ignore[reportMissingImports]


def _pairs(schedule: str) -> list[str]:
    return [f"dp=2,pp=2,ep=2,schedule={name}" for name in (schedule, f"{schedule}_paired")]


PARTS = {
    "chunks": (2, 1, ["dp=2,ep=2", *(f"dp=2,ep=2,expert_chunks={n}" for n in (2, 4, 8))], 8),
    "pairs": (4, 1, _pairs("dualpipev"), 32),
    "dualpipev": (2, 2, _pairs("dualpipev"), 32),
    "dualpipe": (2, 2, _pairs("dualpipe"), 32),
    "tensor": (2, 1, ["tp=2,sp=true", *(f"tp=2,sp=true,tp_chunks={n}" for n in (2, 4, 8))], 4),
}
"""Of each part: number of hosts, ranks of each, layouts, sequences of a step."""
MODEL = [
    "model.arch=moe", "model.layers=4", "model.dim=512", "model.heads=8", "model.experts=8",
    "model.experts_per_token=2", "model.ffn_dim=256", "model.seq_len=256", "model.vocab_size=512",
    "train.microbatch_size=4", "precision.mode=fp32", "observe.tracker=none",
]  # fmt: skip
DENSE = [
    "model.layers=4", "model.dim=512", "model.heads=8", "model.seq_len=256", "model.vocab_size=512",
    "train.microbatch_size=4", "precision.mode=fp32", "observe.tracker=none",
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="1gbit", help="of each host's link")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--part", choices=PARTS, help="one part only")
    parser.add_argument("--model", nargs="*", default=[], help="changes of the recipe")
    parser.add_argument("--name", help="of a single part in the file")
    parser.add_argument("--out", type=Path, help="JSON file for what is measured; other parts in it stay")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.name and not args.part:
        parser.error("--name needs --part: every part has a name of its own")
    if args.worker:
        worker(args.worker, args.part, args.rounds, args.model)
        return 0
    found = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    try:
        for part in [args.part] if args.part else [name for name in PARTS if name != "tensor"]:
            found[args.name or part] = measure(part, args.rate, args.rounds, args.model)
    except Unavailable as reason:
        print(f"skipped: {reason}", file=sys.stderr)
        return 0
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def model_of(part: str) -> list[str]:
    return DENSE if part == "tensor" else MODEL


def measure(part: str, rate: str, rounds: int, changes: list[str]) -> dict[str, Any]:
    count, ranks = PARTS[part][:2]
    with tempfile.TemporaryDirectory() as folder, Hosts(count, rate) as hosts:
        file = Path(folder, "found.json")
        command = [sys.executable, __file__, "--worker", str(file), "--part", part, "--rounds", str(rounds)]
        command += ["--model", *changes] if changes else []
        done = hosts.run(command, ranks, env={"OMP_NUM_THREADS": "1"}, timeout_s=1200)
        if done.code:
            raise SystemExit(f"measuring failed: {done}")
        found = {"hosts": hosts.count, "rate": rate, "model": model_of(part) + changes} | json.loads(
            file.read_text()
        )
    for row in found["layouts"]:
        print(f"{row['layout']}: {row['seconds']:.3f} s per step, {row['ratio']:.3f} of the first's")
    return found


def worker(file: Path, part: str, rounds: int, changes: list[str]) -> None:
    """One rank's part. The first one writes what was found. Ranks that follow each other are on different hosts, and so
    are the pairs of ranks that divide experts."""
    from steps import Numbers, take  # pyright: ignore[reportMissingImports]

    from fivefold.host.machine import describe
    from fivefold.launch.ranks import join
    from fivefold.recipe import load, resolve

    hosts, per_host, layouts, batch = PARTS[part]
    host, local = divmod(int(os.environ["RANK"]), per_host)
    os.environ["RANK"] = str(local * hosts + host)
    sets = [*model_of(part), f"train.global_batch_size={batch}", *changes]
    with join(timeout_s=120) as ranks:
        recipes = [resolve(load("quickstart", sets, layout), vocab_size=512) for layout in layouts]
        # without a mode that makes the load even: it would see every operation, and keep pairs apart
        steps = [take(ranks, recipe, Numbers(recipe), evenly=False) for recipe in recipes]
        times: list[dict[int, float]] = []
        for number in range(rounds + 1):
            row, order = {}, range(len(steps))
            for index in reversed(order) if number % 2 else order:
                mesh, step = steps[index]
                mesh.axis("all").barrier()
                began = time.perf_counter()
                step(None)
                mesh.axis("all").barrier()
                row[index] = time.perf_counter() - began
            times.append(row)
        found: dict[str, Any] = {"machine": describe(), "rounds": rounds, "layouts": []}
        for index, layout in enumerate(layouts):
            seconds = [row[index] for row in times[1:]]
            ratios = [row[index] / row[0] for row in times[1:]]
            found["layouts"].append(
                {"layout": layout, "seconds": median(seconds), "ratio": median(ratios), "ratios": ratios}
            )
        if ranks.first:
            file.write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
