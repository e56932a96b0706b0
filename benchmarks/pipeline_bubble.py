"""Idle share of pipeline schedules, measured through the trainer's own runner, beside what the simulator says.

    python benchmarks/pipeline_bubble.py [--ranks 4] [--microbatches 8] [--unit-ms 30] [--steps 5] [--out FILE.json]

The stages sleep instead of computing, so that ranks that share few cores do not disturb one another: forward, the
gradient of the input and the gradients of the weights take `unit-ms` each, for all stages of a rank together. What
is measured is the rest: the order of the actions, the transfers (real ones, of activations of the common work: 2 x
256 x 384 in fp32), and the runner's own work. Of the steps after the first the median counts. The simulator knows the
length of the sleeps, and how long a transfer takes between two ranks that do nothing else, measured before.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from fivefold.host.machine import describe
from fivefold.launch.local import start_ranks
from fivefold.launch.ranks import Ranks
from fivefold.models.base import LanguageModel, block_dict
from fivefold.observe.timelines import pipeline_svg
from fivefold.parallel.autograd import Deferred
from fivefold.parallel.mesh import Mesh, Microbatch
from fivefold.parallel.pipeline import Pipeline
from fivefold.schedules.pipeline import SCHEDULES, Costs, Timeline, build, simulate
from fivefold.sharding.layout import Layout

ROWS, LENGTH, DIM = 2, 256, 384


@dataclass(frozen=True)
class Case:
    schedule: str
    stages: int  # a rank
    ranks: int
    microbatches: int
    unit_s: float
    steps: int


class Sleeper(LanguageModel):
    """A stage of one block, which sleeps."""

    def __init__(self, seconds: float, first: bool, last: bool):
        super().__init__()
        self.first, self.last = first, last
        self.weight = nn.Parameter(torch.zeros(DIM))
        self.blocks = block_dict([SleepingBlock(seconds)])

    def begin(self, tokens_BT: Tensor, positions_T: Tensor) -> Tensor:
        return torch.zeros(ROWS, LENGTH, DIM) + self.weight

    def end(self, x_BTD: Tensor, targets_BT: Tensor | None) -> Tensor:
        return x_BTD.mean()


class SleepingBlock(nn.Module):
    """Takes `seconds` for each of forward, gradient of the input and gradient of the weights."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds, self.deferred = seconds, Deferred()  # the pipeline puts its own there

    def forward(self, x_BTD: Tensor) -> Tensor:
        return Sleep.apply(x_BTD, self.seconds, self.deferred)


class Sleep(Function):
    @staticmethod
    def forward(ctx, x: Tensor, seconds: float, deferred: Deferred) -> Tensor:
        ctx.seconds, ctx.deferred = seconds, deferred
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, *grads: Tensor):
        time.sleep(ctx.seconds)
        weights: Callable[[], None] = partial(time.sleep, ctx.seconds)
        if ctx.deferred.queue is None:
            weights()
        else:
            ctx.deferred.queue.append(weights)
        return grads[0], None, None


def measure(cases: list[Case], folder: Path, ranks: Ranks) -> None:
    """One rank's part; rank 0 writes what was found."""
    torch.set_num_threads(1)
    found, transfer_s = [], time_transfer(ranks)
    for case in cases:
        layout = Layout(pp=case.ranks, schedule=case.schedule, virtual_stages=case.stages)
        mesh, count = Mesh(layout, ranks), case.ranks * case.stages
        rank_of = build(case.schedule, case.ranks, 1, case.stages).rank_of
        own = [stage for stage, owner in enumerate(rank_of) if owner == ranks.rank]
        stages = {s: Sleeper(case.unit_s / case.stages, s == 0, s == count - 1) for s in own}
        pipeline = Pipeline(stages, mesh, DIM, torch.float32)
        pipeline.recording = True
        tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
        timelines = []
        for _ in range(case.steps + 1):
            pipeline.forward_backward(
                [Microbatch(tokens, tokens)] * case.microbatches, 1.0, lambda i, stage: None
            )
            assert pipeline.recorded is not None
            timelines.append(pipeline.recorded[1])
        timelines = sorted(timelines[1:], key=lambda t: t.bubble)
        middle = timelines[len(timelines) // 2]
        planned = plan(case, transfer_s)
        found.append(
            asdict(case)
            | {"transfer_s": transfer_s}
            | {"simulated_idle": planned.bubble, "measured_idle": median(t.bubble for t in timelines)}
            | {"simulated_s": planned.makespan, "measured_s": median(t.makespan for t in timelines)}
        )
        if ranks.first:
            for name, timeline in (("planned", planned), ("measured", middle)):
                svg = pipeline_svg(
                    timeline, f"{case.schedule}, {name}", seconds=max(planned.makespan, middle.makespan)
                )
                (folder / f"{case.schedule}-{name}.svg").write_text(svg)
    if ranks.first:
        (folder / "found.json").write_text(json.dumps(found))


def time_transfer(ranks: Ranks, repeats: int = 20) -> float:
    """Seconds to send activations from one rank to another: the median of half a round trip."""
    tensor, times = torch.zeros(ROWS, LENGTH, DIM), []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        for source in (0, 1):
            if ranks.rank == source:
                dist.send(tensor, 1 - source)
            elif ranks.rank == 1 - source:
                dist.recv(tensor, source)
        times.append((time.perf_counter() - start) / 2)
    result = torch.tensor(median(times))
    dist.broadcast(result, 0)
    return result.item()


def plan(case: Case, transfer_s: float) -> Timeline:
    """The timeline that the simulator gives."""
    each = case.unit_s / case.stages
    schedule = build(case.schedule, case.ranks, case.microbatches, case.stages)
    return simulate(schedule, Costs(forward=each, input=each, weight=each, transfer=transfer_s))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--unit-ms", type=float, default=30.0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--pictures", type=Path, help="folder for the timelines, planned and measured")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cases = [
        Case(name, fewest, args.ranks, args.microbatches, args.unit_ms / 1e3, args.steps)
        for name, fewest in ((name, schedule.stages[0]) for name, schedule in SCHEDULES.items())
    ]
    with TemporaryDirectory() as name:
        folder = args.pictures or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        start_ranks(partial(measure, cases, folder), args.ranks, fork=True)
        found = json.loads((folder / "found.json").read_text())
        (folder / "found.json").unlink()
    show(found)
    if args.out:
        args.out.write_text(json.dumps({"machine": describe(), "results": found}, indent=2) + "\n")


def show(found: list[dict]) -> None:
    print(
        f"{'schedule':<12} {'idle, measured':>15} {'simulated':>10} {'points':>7} {'step':>8} {'simulated':>10}"
    )
    for row in found:
        measured, simulated = row["measured_idle"], row["simulated_idle"]
        print(
            f"{row['schedule']:<12} {measured:>15.1%} {simulated:>10.1%} {100 * (measured - simulated):>+7.1f} "
            f"{row['measured_s']:>6.3f} s {row['simulated_s']:>8.3f} s"
        )
    print(f"transfer of a microbatch's activations: {found[0]['transfer_s'] * 1e3:.2f} ms")
    idle = {row["schedule"]: row["measured_idle"] for row in found}
    print(f"zbv is idle {idle['zbv'] / idle['1f1b']:.2f} times as much as 1f1b")


if __name__ == "__main__":
    main()
