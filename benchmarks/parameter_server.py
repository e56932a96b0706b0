"""The seconds of a step with a parameter server, first in first out and by priority, beside the simulator's.

    python benchmarks/parameter_server.py [--rate 100mbit] [--rounds 2] [--steps 14] [--out FILE.json]
    python benchmarks/parameter_server.py --stragglers [--out FILE.json]

A server and a worker on two hosts (network namespaces with a rate limit). Blocks sleep in forward and backward instead
of computing, so that the hosts, which share this machine's cores, do not slow each other down. All else is real. The
simulator gets rate and latency from a transfer before the runs; each unit's seconds, and what a part takes the hosts
beyond its bytes, from the runs in FIFO order. So it predicts the step by priority.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from namespaces import Hosts, Unavailable  # pyright: ignore[reportMissingImports]

from fivefold.recipe import Recipe, load, resolve
from fivefold.schedules.priority import ORDERS, Layer, Line, Simulation

V, WARM_UP, PARTS = 256, 3, 40
PARTITION = 1 << 17
FORWARD, BACKWARD = 0.06, 0.06  # seconds that a block sleeps
MODEL = [
    "model.layers=8", "model.dim=192", "model.heads=6", "model.kv_heads=6", "model.ffn_dim=512", "model.seq_len=16",
    f"model.vocab_size={V}", "model.tie_embeddings=false", "train.global_batch_size=1", "train.microbatch_size=1",
    "precision.mode=fp32", "optim.grad_clip=0", "faults.on_nonfinite=abort", "observe.tracker=none",
    "sync.method=server",
    f"sync.order=priority:{PARTITION >> 10}KiB",
]  # fmt: skip


class Numbers:
    """Batches of random tokens."""

    def batch(self, i: int, rows: range) -> tuple[np.ndarray, np.ndarray]:
        block = np.random.default_rng((i, rows.start)).integers(0, V, (len(rows), 17))
        return block[:, :-1], block[:, 1:]


def recipe_of(steps: int, order: str) -> Recipe:
    sets = [*MODEL, f"train.steps={steps}", f"sync.order={order}:{PARTITION >> 10}KiB"]
    return resolve(load("quickstart", sets, "dp=1"), vocab_size=V)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--stragglers", action="store_true", help="a slow worker, in place of the order of messages"
    )
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        part(args.part, args.rounds, args.steps)
        return
    if args.stragglers:
        show(stragglers(args.steps), args.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            __file__,
            "--part",
            folder,
            "--rounds",
            str(args.rounds),
            "--steps",
            str(args.steps),
        ]
        try:
            with Hosts(2, args.rate) as hosts:
                env = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
                done = hosts.run(command, ranks=1, capture=True, timeout_s=280, env=env)
        except Unavailable as error:
            sys.exit(f"skipped: {error}")
        if done.code:
            sys.exit(str(done))
        found = compared(Path(folder)) | {"rate": args.rate}
    show(found, args.out)


def show(found: dict[str, Any], out: Path | None) -> None:
    print(json.dumps({key: value for key, value in found.items() if key != "traces"}, indent=1))
    if out:
        out.write_text(json.dumps(found) + "\n", encoding="utf-8")


class Lagging(Numbers):
    """The last worker takes so many seconds more for each share."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def batch(self, i: int, rows: range) -> tuple[np.ndarray, np.ndarray]:
        time.sleep(self.seconds)
        return super().batch(i, rows)


def stragglers(steps: int) -> dict[str, Any]:
    """A server and three workers on this machine, the last of them slow: synchronous and asynchronous."""
    from fivefold.launch.local import start_ranks

    found: dict[str, Any] = {"traces": []}
    with tempfile.TemporaryDirectory() as folder:
        for name, staleness in (("synchronous", 0), ("asynchronous", -1)):
            out = Path(folder, name)
            start_ranks(partial(straggle, steps, staleness, out), 4, fork=False)
            lines = [json.loads(line) for line in (out / "workers.jsonl").read_text().splitlines()]
            found["traces"].append((name, lines))
            began, ended = min(line["begin"] for line in lines), max(line["end"] for line in lines)
            counts = [sum(line["worker"] == worker for line in lines) for worker in range(3)]
            found[name] = {
                "seconds": ended - began,
                "shares": counts,
                "lag": max(line["lag"] for line in lines),
            }
    found["gain"] = found["synchronous"]["seconds"] / found["asynchronous"]["seconds"]
    return found


def straggle(steps: int, staleness: int, out: Path, ranks: Any) -> int | None:
    from fivefold.train.job import Job
    from fivefold.train.run import run_rank

    small = ["model.layers=2", "model.dim=96", "model.heads=4", "model.kv_heads=4", "model.ffn_dim=192"]
    small += [
        f"train.steps={steps}",
        f"sync.staleness={staleness}",
        "train.global_batch_size=6",
        "train.microbatch_size=2",
    ]
    recipe = resolve(load("quickstart", [*MODEL, *small], "dp=3"), vocab_size=V)
    return run_rank(Job(recipe, out, None, batches=Lagging(0.3 if ranks.rank == 3 else 0.06)), ranks)


def compared(folder: Path) -> dict[str, Any]:
    """Measured beside simulated."""
    server, worker = (json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2))
    layers = layers_of([trace for order, trace in worker["traces"] if order == "fifo"])
    found: dict[str, Any] = {"link": worker["link"], "layers": [vars(layer) for layer in layers]}
    for order in ORDERS:
        steps = [s for one, seconds in server["steps"] if one == order for s in seconds[WARM_UP:]]
        found[order] = {"measured_s": median(steps), "steps": len(steps)}
    return simulated(found | {"traces": [(order, trimmed(trace)) for order, trace in worker["traces"][-2:]]})


def simulated(found: dict[str, Any]) -> dict[str, Any]:
    """Adds what the simulator says."""
    layers = [Layer(**layer) for layer in found["layers"]]
    found["link"]["part"] = part_seconds(dict(found["traces"])["fifo"], layers, found["link"]["up"])
    for order in ORDERS:
        line = Line(**found["link"], partition=PARTITION, order=order)
        found[order]["simulated_s"] = Simulation(layers, line, iterations=12).seconds
    gains = [found["fifo"][key] / found["priority"][key] for key in ("measured_s", "simulated_s")]
    found["gain"] = {"measured": gains[0], "simulated": gains[1], "ratio": gains[1] / gains[0]}
    return found


def part_seconds(trace: list[list[Any]], layers: list[Layer], rate: float) -> float:
    """Seconds that a part takes the hosts beyond its bytes: from the ends of pushes while others waited behind them."""
    pushes = sorted((event for event in trace if event[0] == "push"), key=lambda event: event[3])
    gaps = [b[3] - a[3] for a, b in pairwise(pushes) if b[2] < (a[2] + a[3]) / 2]
    parts = sum(-int(-layer.pushed // PARTITION) for layer in layers)
    return mean(gaps) - sum(layer.pushed for layer in layers) / parts / rate


def trimmed(trace: list[list[Any]], steps: int = 3) -> list[list[Any]]:
    """The last steps of a trace, for the picture."""
    ends = [end for what, unit, _, end in trace if what == "ready" and unit == 0]
    origin = ends[-steps - 1]
    return [
        [what, unit, round(a - origin, 4), round(b - origin, 4)] for what, unit, a, b in trace if a >= origin
    ]


def layers_of(traces: list[list[Any]]) -> list[Layer]:
    """Medians of each unit's seconds over the steps of the traces."""
    recipe = recipe_of(1, "fifo")
    sizes = unit_sizes(recipe)
    forward: list[list[float]] = [[] for _ in sizes]
    backward: list[list[float]] = [[] for _ in sizes]
    for trace in traces:
        last: tuple[str, int, float] | None = None
        for what, unit, start, end in trace:
            if what == "need" or what == "loss":
                if last and last[0] == "need":
                    forward[last[1]].append(start - last[2])
                last = what, unit, end
            elif what == "ready" and last:
                backward[unit].append(start - last[2])
                last = what, unit, end
    return [
        Layer(median(f[-40:]), median(b[-40:]), 4 * size, 4 * size)
        for f, b, size in zip(forward, backward, sizes, strict=True)
    ]


def unit_sizes(recipe: Recipe) -> list[int]:
    from fivefold.models.card import card_of
    from fivefold.sharding.sync import messages

    found: dict[int, int] = {}
    for message in messages(card_of(recipe.model), recipe.servers):
        found[message.unit] = found.get(message.unit, 0) + message.size
    return list(found.values())


def part(folder: Path, rounds: int, steps: int) -> None:
    """What each rank does."""
    from fivefold.comm import everyone
    from fivefold.launch import ranks as ranks_
    from fivefold.observe.metrics import read_metrics
    from fivefold.train import server_run
    from fivefold.train.job import Job
    from fivefold.train.run import run_rank

    found: dict[str, Any] = {"steps": [], "traces": []}
    keep, traces = server_run.worker_state, []

    def traced(*arguments: Any) -> Any:
        state, exchange = keep(*arguments)
        for block in state.module.get_submodule("blocks").children():
            block.register_forward_hook(lambda *call: sleeping(call[-1]))
        exchange.trace = []
        traces.append(exchange.trace)
        return state, exchange

    server_run.worker_state = traced
    with ranks_.join(timeout_s=120) as ranks:
        found["link"] = link(everyone(ranks))
        for number in range(rounds):
            for order in ORDERS:
                out = folder / f"{number}-{order}"
                run_rank(Job(recipe_of(steps, order), out, None, batches=Numbers()), ranks)
                if ranks.first:
                    found["steps"].append(
                        (order, [line["step_s"] for line in read_metrics(out) if "step_s" in line])
                    )
                else:
                    found["traces"].append((order, traces[-1]))
        (folder / f"rank{ranks.rank}.json").write_text(json.dumps(found))


def sleeping(x: Any) -> Any:
    """x. Its forward and its backward take a while."""
    import torch

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            time.sleep(FORWARD)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, dx: torch.Tensor) -> torch.Tensor:
            time.sleep(BACKWARD)
            return dx

    return Sleep.apply(x)


def link(axis: Any) -> dict[str, float]:
    """Rates of both ways, used at once as in training, in parts of messages; and the latency of a small one."""
    import torch

    parts, other = [torch.zeros(PARTITION // 4) for _ in range(2 * PARTS)], 1 - axis.index
    small, turns = torch.zeros(16), 200

    def both() -> float:
        axis.barrier()
        began = time.perf_counter()
        started = [axis.start_receive(x, other, 1 + tag) for tag, x in enumerate(parts[PARTS:])]
        started += [axis.start_send(x, other, 1 + tag) for tag, x in enumerate(parts[:PARTS])]
        for one in started:
            one()
        axis.barrier()
        return time.perf_counter() - began

    both()
    rate = PARTS * PARTITION / median(both() for _ in range(3))
    began = time.perf_counter()
    for _ in range(turns):
        for source in (0, 1):
            (axis.start_send(small, other) if axis.index == source else axis.start_receive(small, other))()
    return {"up": rate, "down": rate, "latency": (time.perf_counter() - began) / turns / 2}


if __name__ == "__main__":
    main()
