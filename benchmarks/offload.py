"""Training a model whose states exceed the allowed memory: losses, step time and I/O, beside the same in memory.

    python benchmarks/offload.py [--layers 64] [--limit-mib 870] [--steps 6] [--gbps 1] [--out FILE]

Each run is a process of its own. The offloaded one is in a memory cgroup (version 1, which must be writable) with the
limit, page cache included. `--gbps` throttles the disk by a blkio cgroup, reads and writes alike. The disk's bandwidth
is measured inside the same limit, on a file of 1.5 times the limit (bench/hardware.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fivefold.recipe import Recipe, load, resolve
from fivefold.sharding.layout import Layout

MEMORY, BLKIO = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup/blkio")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--ffn", type=int, default=1408)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--microbatch", type=int, default=8)
    parser.add_argument("--limit-mib", type=int, default=870)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--gbps", type=float, default=0.0, help="throttles the disk; 0: as it is")
    parser.add_argument("--offloads", nargs="*", default=["none", "all:disk"])
    parser.add_argument("--dir", type=Path, default=Path.cwd() / ".offload")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker == "disk":
        from fivefold_plan.bench.hardware import bandwidth

        return print(json.dumps(bandwidth(args.dir, int(1.5 * (args.limit_mib << 20)))))
    if args.worker:
        return print(json.dumps(work(args)))
    found: dict[str, Any] = {
        "command": " ".join(["benchmarks/offload.py", *sys.argv[1:]]),
        "limit_bytes": args.limit_mib << 20,
        "gbps": args.gbps,
    }
    with limited(args.limit_mib << 20, args.gbps, args.dir) as enter:
        found["disk"] = run(args, "disk", enter)
    print(json.dumps(found["disk"]), flush=True)
    for offload in args.offloads:
        if offload == "none":
            found[offload] = run(args, offload, "")
        else:
            with limited(args.limit_mib << 20, args.gbps, args.dir) as enter:
                found[offload] = run(args, offload, enter) | usage()
        print(offload, json.dumps(found[offload]), flush=True)
    if "none" in found:
        for offload in {*args.offloads} - {"none"}:
            found[offload] |= compared(args, found["none"], found[offload], found["disk"], offload)
            print(offload, {key: round(found[offload][key], 3) for key in FIGURES})
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


FIGURES = ("states_by_limit", "slowdown", "predicted_by_measured", "hidden")


def compared(
    args: argparse.Namespace, none: dict[str, Any], away: dict[str, Any], disk: dict[str, float], offload: str
) -> dict[str, Any]:
    """Checks that losses and norms are the same, and relates the steps after the first two: the first update, in the
    second step's forward, reads no states. predicted: by the planner (time/offload.py), from the seconds of
    forward, backward and update in memory and the bandwidth of the disk."""
    steps, others = none["steps"], away["steps"]
    assert [(s["loss"], s["norm"]) for s in steps] == [(s["loss"], s["norm"]) for s in others], "other bits"

    def middle(rows: list[dict[str, Any]], key: str) -> float:
        return statistics.median(row[key] for row in rows[2:])

    bytes_per_parameter = 2 + 4 + 4 + 8
    measured = middle(others, "seconds")
    predicted = planned(
        args, [middle(steps, key) for key in ("forward", "backward", "update")], disk, offload
    )
    return {
        "states_by_limit": bytes_per_parameter * none["parameters"] / (args.limit_mib << 20),
        "slowdown": measured / middle(steps, "seconds"),
        "predicted_s": predicted,
        "predicted_by_measured": predicted / measured,
        "hidden": 1 - sum(row["waited"] for row in others[2:]) / sum(row["busy"] for row in others[2:]),
    }


def planned(args: argparse.Namespace, parts: list[float], disk: dict[str, float], offload: str) -> float:
    from fivefold_plan.cluster.clusters import parse
    from fivefold_plan.cluster.devices import Storage
    from fivefold_plan.memory.model_states import rank_elements
    from fivefold_plan.predict import resolved
    from fivefold_plan.setting import setting
    from fivefold_plan.time import offload as prices

    recipe = resolved(recipe_of(args, offload))
    layout = Layout.from_recipe(recipe.layout)
    m = args.batch // args.microbatch
    s = setting(recipe.model, layout, parse("h100"), args.microbatch, m)
    machine: Any = SimpleNamespace(on_cpu=True)
    cluster = replace(s.cluster, machine=machine, storage=Storage(disk["read"], disk["write"], disk["both"]))
    s = replace(s, cluster=cluster)
    forward, backward, update = parts
    return prices.seconds(s, forward / m, backward / m, update, rank_elements(s)[0])


@contextmanager
def limited(limit: int, gbps: float, folder: Path) -> Iterator[str]:
    """Makes the cgroups; yields the shell's words that enter them."""
    own = Path("/proc/self/cgroup").read_text().splitlines()
    here = next((line.split(":", 2)[2] for line in own if ":memory:" in line), "/").lstrip("/")
    group = MEMORY / here / "fivefold-offload"
    group.mkdir(exist_ok=True)
    groups = [group]
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        if gbps:
            groups.append(BLKIO / "fivefold-offload")
            groups[1].mkdir(exist_ok=True)
            folder.mkdir(parents=True, exist_ok=True)
            device = folder.stat().st_dev
            for way in ("read", "write"):
                text = f"{os.major(device)}:{os.minor(device)} {int(gbps * 1e9)}"
                (groups[1] / f"blkio.throttle.{way}_bps_device").write_text(text)
        limited.group = group  # type: ignore[attr-defined]
        yield "".join(f"echo $$ > {one}/cgroup.procs && " for one in groups)
    finally:
        for one in groups:
            for _ in range(50):
                try:
                    one.rmdir()
                    break
                except OSError:
                    time.sleep(0.1)


def usage() -> dict[str, int]:
    """What the memory cgroup counted."""
    group: Path = limited.group  # type: ignore[attr-defined]
    names = {"cgroup_peak_bytes": "memory.max_usage_in_bytes", "cgroup_failcnt": "memory.failcnt"}
    return {key: int((group / file).read_text()) for key, file in names.items()}


def run(args: argparse.Namespace, worker: str, enter: str) -> dict[str, Any]:
    command = [sys.executable, *sys.argv, "--worker", worker]
    done = subprocess.run(
        ["sh", "-c", enter + 'exec "$@"', "sh", *command], stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        return {"failed": done.returncode}
    return json.loads(done.stdout.splitlines()[-1])


def recipe_of(args: argparse.Namespace, offload: str, layout: str = "dp=1") -> Recipe:
    sets = [
        f"model.layers={args.layers}", f"model.dim={args.dim}", f"model.heads={args.dim // 64}",
        f"model.kv_heads={args.dim // 64}", f"model.ffn_dim={args.ffn}", f"model.seq_len={args.seq}",
        f"train.global_batch_size={args.batch}", f"train.microbatch_size={args.microbatch}", "precision.mode=bf16",
        "train.steps=100", "optim.warmup_steps=0", "train.sample_every=0", "layout.recompute=full",
        f"model.vocab_size={args.vocab}",
        f"layout.offload={offload}", f"layout.offload_dir={args.dir}",
    ]  # fmt: skip
    return load("quickstart", sets, layout)


class Clock:
    """Seconds of forward and of the update in a step."""

    def __init__(self, state: Any):
        self.forward = self.update = self.began = 0.0
        state.module.register_forward_pre_hook(lambda *_: self._begin())
        state.module.register_forward_hook(lambda *_: self._end("forward"))
        (replica,) = state.parallel.replicas
        update = replica.update

        def timed(*arguments: Any) -> None:
            self._begin()
            update(*arguments)
            self._end("update")

        replica.update = timed

    def _begin(self) -> None:
        self.began = time.perf_counter()

    def _end(self, name: str) -> None:
        setattr(self, name, getattr(self, name) + time.perf_counter() - self.began)


def work(args: argparse.Namespace) -> dict[str, Any]:
    import resource

    import torch

    from fivefold.host.machine import keep_freed_memory, keep_little_memory, resident_bytes
    from fivefold.launch.ranks import Ranks
    from fivefold.parallel.mesh import Microbatch
    from fivefold.step.state import build_state
    from fivefold.step.step import take_step

    keep_freed_memory() if args.worker == "none" else keep_little_memory()
    recipe = resolve(recipe_of(args, args.worker), vocab_size=args.vocab)
    before = resident_bytes()[0]
    state = build_state(recipe, Ranks(0, 1, 0, 1, torch.device("cpu")))
    disk, clock = state.parallel.disk, Clock(state)
    steps = []
    for step in range(args.steps):
        torch.manual_seed(step)
        tokens = torch.randint(0, args.vocab, (args.batch, args.seq + 1))
        share = [
            Microbatch(tokens[i : i + args.microbatch, :-1], tokens[i : i + args.microbatch, 1:])
            for i in range(0, args.batch, args.microbatch)
        ]
        meter = disk.meter.figures() if disk else {}
        clock.forward = clock.update = 0.0
        began = time.perf_counter()
        done = take_step(state, recipe, share)
        seconds = time.perf_counter() - began
        line: dict[str, Any] = {"loss": done.loss, "norm": done.norm, "seconds": seconds}
        line |= {"forward": clock.forward, "update": clock.update}
        line["backward"] = seconds - clock.forward - clock.update
        if disk:
            line |= {key: value - meter[key] for key, value in disk.meter.figures().items()}
        steps.append(line)
        print(json.dumps(line), file=sys.stderr, flush=True)
    parameters = sum(w.numel() for w in state.masters().values())
    state.parallel.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"parameters": parameters, "steps": steps, "python_bytes": before, "peak_rss_bytes": peak}


if __name__ == "__main__":
    main()
