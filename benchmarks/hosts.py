"""Several hosts on one machine: runs a command under torchrun across them, or measures the links between them.

    python benchmarks/hosts.py --hosts 2 --ranks 2 --rate 200mbit -- fivefold train quickstart --out runs/hosts
    python benchmarks/hosts.py --hosts 2 --ranks 2 --rate 200mbit [--out benchmarks/results/hosts.json]
    python benchmarks/hosts.py --hosts 2 --ranks 2 --rate 200mbit --collectives 4K,1M [--out FILE.json]
    python benchmarks/hosts.py --hosts 2 --ranks 2 --rate 200mbit --train [--out benchmarks/results/hosts_train.json]

The hosts are Linux namespaces (`tests/namespaces.py`), which root may make, and other users where user namespaces are
permitted. Where they are not, the script says so and ends with 0. Without a command it measures, with gloo:

- the link: seconds of a message of 64 bytes, bytes/s of a large one, between two ranks of a host and of two hosts;
- all-reduce of 4 KiB to 16 MiB over the ranks of one host, over one rank of each host, and over all ranks.

Messages are sent one directly after another, and the median counts. Nothing else should run.

`--collectives` times every all-reduce of `schedules/collectives` over all ranks at these sizes, the median of 20
repetitions, beside the time that the simulator predicts. Its alpha, beta and gamma are fitted to single messages,
measured in the same run. What is in the file already stays there.

`--train` trains a small model in several layouts. The planner predicts the step of each and the bytes that leave a
host, on a cluster of such hosts whose link is measured in the same run. `fivefold bench hardware` must have run before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import hosts_collectives as collectives

from fivefold.cli.options import bytes_of
from fivefold.recipe import Recipe, load, microbatches_per_step, resolve

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from namespaces import Hosts, Unavailable  # pyright: ignore[reportMissingImports]

SIZES = {4 << 10: 60, 64 << 10: 40, 1 << 20: 20, 4 << 20: 10, 16 << 20: 5}
"""Bytes that every rank reduces, and the number of repetitions."""
LAYOUTS = (
    "dp=4",
    "dp=4,all_reduce=library",
    "dp_replicate=2,dp_shard=2,zero=1",
    "dp_replicate=2,dp_shard=2,zero=3",
    "dp=4,zero=3",
    "dp=2,tp=2",
    "dp=2,pp=2",
)
MODEL = [
    "model.layers=4", "model.dim=256", "model.heads=8", "model.ffn_dim=768", "model.seq_len=128",
    "model.tie_embeddings=true", "train.global_batch_size=4", "train.microbatch_size=1", "train.steps=1000",
    "precision.mode=fp32",
]  # fmt: skip
STEPS = 5
SMALL, LARGE = 64, 16 << 20  # bytes of the messages that measure latency and bandwidth


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="ranks of each host")
    parser.add_argument(
        "--rate", default="200mbit", help="of each host's link, such as 1gbit; none: unlimited"
    )
    parser.add_argument("--timeout", type=float, default=3600, metavar="SECONDS", help="until all is killed")
    parser.add_argument("--out", type=Path, help="JSON file for what is measured")
    parser.add_argument("--collectives", metavar="SIZES", help="measure every all-reduce at these sizes")
    parser.add_argument("--only", nargs="*", default=[], help="algorithms of --collectives")
    parser.add_argument("--train", action="store_true", help="measure training instead of messages")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="*", help="what to run (after --); nothing: measure")
    args = parser.parse_args()
    sizes = (
        [bytes_of("--collectives", size) for size in args.collectives.split(",")] if args.collectives else []
    )
    if args.worker:
        if sizes:
            collectives.worker(args.worker, sizes, args.only)
        else:
            (train_worker if args.train else worker)(args.worker)
        return 0
    rate = None if args.rate == "none" else args.rate
    options = ["--train"] * args.train + (
        ["--collectives", args.collectives, "--only", *args.only] if sizes else []
    )
    try:
        with Hosts(args.hosts, rate) as hosts:
            if args.command:
                return hosts.run(args.command, args.ranks, timeout_s=args.timeout).code
            found = measure(hosts, args.ranks, options, args.timeout)
        if args.train:
            found = planned(found)
        if sizes:
            found = collectives.merged(collectives.predicted(found), args.out)
    except Unavailable as reason:
        print(f"skipped: {reason}", file=sys.stderr)
        return 0
    except ValueError as error:
        parser.error(str(error))
    print((train_report if args.train else collectives.report if sizes else report)(found))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def measure(hosts: Hosts, ranks: int, options: Sequence[str] = (), timeout_s: float = 600) -> dict[str, Any]:
    """What the workers find, on `ranks` ranks of every host."""
    with tempfile.TemporaryDirectory(prefix="fivefold-hosts-") as folder:
        file = Path(folder, "found.json")
        command = [sys.executable, __file__, "--worker", str(file), *options]
        done = hosts.run(command, ranks, timeout_s=timeout_s)
        if done.code:
            raise SystemExit(f"measuring failed: {done}")
        return json.loads(file.read_text()) | {"hosts": hosts.count, "ranks": ranks, "rate": hosts.rate}


def worker(file: Path) -> None:
    """One rank's part. The first one writes what was found."""
    from fivefold.host.machine import describe
    from fivefold.launch.ranks import join

    with join(timeout_s=120) as ranks:
        local, world = ranks.local_world, ranks.world
        groups = {
            "one host": range(local),
            "one rank of each host": range(0, world, local),
            "all": range(world),
        }
        groups = {name: members for name, members in groups.items() if len(members) > 1}
        axes = {name: axis for name, members in groups.items() if (axis := _axis(name, members, ranks))}
        everyone = axes["all"]
        found: dict[str, Any] = {"machine": describe(), "link": {}, "all_reduce": {}}
        for name in groups:
            everyone.barrier()
            if name in axes and name != "all":
                found["link"][name] = link(axes[name])
        for name in groups:
            everyone.barrier()
            if name in axes:
                found["all_reduce"][name] = all_reduces(axes[name])
        everyone.barrier()
        if ranks.first:
            file.write_text(json.dumps(found))


def _axis(name: str, members: range, ranks: Any) -> Any:
    """The axis of these ranks; None for a rank that is not one of them. All ranks call it."""
    import torch.distributed as dist

    from fivefold.comm import Axis

    group = dist.new_group(list(members))
    if not isinstance(group, dist.ProcessGroup) or ranks.rank not in members:
        return None
    return Axis(name, list(members), members.index(ranks.rank), ranks.device, group)


def link(axis: Any, other: int = 1) -> dict[str, float]:
    """Seconds of a small message, and bytes/s of a large one in one direction and in both at once, between an axis'
    first rank and another."""
    import torch

    if axis.index not in (0, other):
        return {}
    peer = other - axis.index
    small, large, back = (torch.zeros(size, dtype=torch.uint8) for size in (SMALL, LARGE, LARGE))

    def there_and_back(x: torch.Tensor) -> None:
        for sender in (0, other):
            (axis.start_send if axis.index == sender else axis.start_receive)(x, peer)()

    small_s, large_s = (
        timed(lambda x=x: there_and_back(x), times) / 2 for x, times in ((small, 200), (large, 3))
    )
    both = timed(lambda: axis.start_exchange(large, peer, back, peer)(), 3)
    return {"latency_s": small_s, "bytes_s": LARGE / large_s, "both_ways_bytes_s": LARGE / both}


def all_reduces(axis: Any) -> dict[str, float]:
    """Seconds of gloo's all-reduce by size."""
    import torch

    found = {}
    for size, times in SIZES.items():
        x = torch.zeros(size // 4)
        found[str(size)] = timed(lambda x=x: axis.all_reduce(x), times)
    return found


def train_worker(file: Path) -> None:
    """One rank's part of training. The first one writes the link between hosts, and by layout the seconds of a step and
    the bytes that left this host per step, as counted by the kernel."""
    import torch

    from fivefold.comm import everyone
    from fivefold.host.machine import describe
    from fivefold.launch.ranks import join
    from fivefold.parallel.mesh import Microbatch
    from fivefold.step.state import build_state
    from fivefold.step.step import take_step

    found: dict[str, Any] = {"machine": describe(), "model": MODEL, "layouts": {}}
    with join(timeout_s=120) as ranks:
        found["link"] = link(everyone(ranks), ranks.local_world)
        for layout in LAYOUTS:
            recipe = recipe_of(layout)
            state = build_state(recipe, ranks)
            tokens = torch.zeros(1, recipe.model.seq_len, dtype=torch.int64)
            batch = [Microbatch(tokens, tokens)] * microbatches_per_step(recipe)
            marks = []
            for _ in range(STEPS + 2):  # the first step does not count
                everyone(ranks).barrier()
                marks.append((time.perf_counter(), left_host()))
                take_step(state, recipe, batch).wait()
            for replica in state.parallel.replicas:
                replica.close()
            steps = [end[0] - begin[0] for begin, end in itertools.pairwise(marks[1:])]
            left = (marks[-1][1] - marks[1][1]) / STEPS
            found["layouts"][layout] = {"step_s": median(steps), "left_bytes": left}
    if ranks.first:
        file.write_text(json.dumps(found))


def recipe_of(layout: str) -> Recipe:
    return resolve(load("quickstart", MODEL, layout), vocab_size=4096)


def left_host() -> int:
    """Bytes that this host has sent to others."""
    table = Path("/proc/self/net/dev").read_text().splitlines()
    return int(next(line for line in table if "eth0:" in line).split(":")[1].split()[8])


def planned(found: dict[str, Any]) -> dict[str, Any]:
    """Adds what the planner predicts for each layout on these hosts: seconds of a step, and bytes that leave one."""
    from fivefold_plan.cluster.clusters import parse
    from fivefold_plan.predict import predict

    lines = [
        'base = "local"',
        f"devices_per_node = {found['ranks']}",
        f"hosts_per_machine = {found['hosts']}",
    ]
    lines += [f"inter_gb_s = {1e-9 * found['link']['both_ways_bytes_s']}"]
    lines += [f"inter_latency_us = {1e6 * found['link']['latency_s']}"]
    found["cluster"] = lines
    with tempfile.TemporaryDirectory(prefix="fivefold-hosts-") as folder:
        file = Path(folder, "hosts.toml")
        file.write_text("\n".join(lines))
        cluster = parse(f"{file}:{found['hosts']}x{found['ranks']}")
    for layout, row in found["layouts"].items():
        plan = predict(recipe_of(layout), cluster)
        row["predicted_step_s"] = plan.step.seconds
        row["planned_bytes"] = planned_bytes(plan, found["ranks"])
    return found


def planned_bytes(plan: Any, local: int) -> float:
    """Bytes that leave the first host in a step: the planner's messages, each by its algorithm or by gloo's."""
    from fivefold.schedules.collectives import ALGORITHMS, build, shape_of
    from fivefold.schedules.collectives.cost import simulate
    from fivefold.sharding.layout import index_in
    from fivefold_plan.messages import volume
    from fivefold_plan.messages.communication import GLOO, on_hosts, summed_by

    total, s = 0.0, plan.setting
    for rank in range(local):
        for (what, axis), (_, size) in volume.counted(s, rank).items():
            members = s.group(axis)
            if members.nodes > 1 and what in GLOO:
                by = build(*GLOO[what], members.ranks)
                total += simulate(by, on_hosts(members, s.cluster), size).link_bytes / members.local
            elif members.nodes > 1 and what == "send":
                by, share = summed_by(s.layout.all_reduce, members, s.cluster), 1.0
                if (
                    axis != "pp" and by in ALGORITHMS["all_reduce"]
                ):  # some moves of a sum stay inside the host
                    rounds = build("all_reduce", by, shape_of(members.ranks, members.local)).rounds
                    index = index_in(s.layout, axis, rank)
                    mine = [move for moves in rounds for move in moves if move.source == index]
                    apart = [move for move in mine if move.target // members.local != index // members.local]
                    share = sum(len(m.chunks) for m in apart) / sum(len(m.chunks) for m in mine)
                total += share * size
    return total


def train_report(found: dict[str, Any]) -> str:
    head = "| layout | MB left a host, counted | planned | step predicted, s | measured, s | error |"
    lines = [f"{found['rate']} between hosts of {found['ranks']} ranks", "", head, "|" + "---|" * 6]
    for layout, row in found["layouts"].items():
        sizes = " | ".join(f"{1e-6 * row[key]:.2f}" for key in ("left_bytes", "planned_bytes"))
        times = " | ".join(f"{row[key]:.3f}" for key in ("predicted_step_s", "step_s"))
        error = row["predicted_step_s"] / row["step_s"] - 1
        lines.append(f"| {layout} | {sizes} | {times} | {100 * error:+.0f}% |")
    return "\n".join(lines)


def timed(work: Callable[[], object], times: int) -> float:
    """Median seconds, after one round that does not count."""
    laps = []
    for _ in range(times + 1):
        began = time.perf_counter()
        work()
        laps.append(time.perf_counter() - began)
    return median(laps[1:])


def report(found: dict[str, Any]) -> str:
    hosts, ranks = found["hosts"], found["ranks"]
    lines = [f"{hosts} hosts of {ranks} ranks, {found['rate'] or 'unlimited'} between them", ""]
    lines += [
        "| between two ranks of | 64 bytes, us | one way, Mbit/s | both ways, each, Mbit/s |",
        "|" + "---|" * 4,
    ]
    for name, row in found["link"].items():
        speeds = [f"{8e-6 * row[key]:.0f}" for key in ("bytes_s", "both_ways_bytes_s")]
        where = "two hosts" if name.startswith("one rank") else name
        lines.append(f"| {where} | {1e6 * row['latency_s']:.0f} | {' | '.join(speeds)} |")
    sizes = list(SIZES)
    names = [f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB" for size in sizes]
    lines += ["", f"| all-reduce over, ms | {' | '.join(names)} |", "|" + "---|" * (1 + len(sizes))]
    for name, row in found["all_reduce"].items():
        lines.append(f"| {name} | {' | '.join(f'{1e3 * row[str(size)]:.2f}' for size in sizes)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
