"""Measures every all-reduce between local ranks, and fits alpha, beta and gamma to single messages; and how long the
messages of layouts take, by size, and how much of that time the processor is free (`links`).

The prediction is that of `schedules/collectives/cost.py` on local ranks that share the machine: alpha per message in a
row, and for each message the time for which it keeps the machine busy. It is fitted to messages between one pair of
ranks and around the ring, not to the collectives that it predicts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fivefold.comm import Axis, everyone
from fivefold.comm.axis import all_gather_single, reduce_scatter_single
from fivefold.comm.execute import Executor
from fivefold.host import tables
from fivefold.launch.local import returned
from fivefold.launch.ranks import Ranks
from fivefold.precision import TRAINED, torch_dtype
from fivefold.schedules.collectives import ALGORITHMS, Collective, build, shape_of
from fivefold.schedules.collectives.collective import Shape
from fivefold.schedules.collectives.cost import simulate
from fivefold.schedules.collectives.registry import LIBRARY, pieces_of
from fivefold_plan.cluster.clusters import of_fit

MESSAGES = (1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20)  # sizes of the messages that are fitted
ARENA = 32 << 20  # bytes that these messages go through one after the other, so that they come from memory
BATCH, BATCHES = 2e-3, 20  # seconds of a batch of runs at least, and their number; the median counts
# of the library's time: ours are driven by Python, which takes time from what is computed beside
CLEARLY = 0.9
LONGEST, LEAST = 2.0, 5  # seconds after which fewer batches suffice, but not fewer than these


def measure(
    ranks: int, sizes: Sequence[int], say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Measures and saves a table by number of ranks: `fit`; by size and algorithm `seconds`, `predicted`; `best`.

    The process must have used neither torch's threads nor a GPU: ranks are forked.
    """
    say(f"messages between {ranks} local ranks")
    gpu = torch.cuda.is_available()
    found = returned(partial(_measure_rank, tuple(sizes)), ranks, fork=not gpu)
    fit = fitted(found["messages"], ranks)
    net = of_fit(fit, ranks)
    predicted = {
        str(size): {name: simulate(x, net, size).seconds for name, x in collectives(net.shape, size).items()}
        for size in sizes
    }
    best = {size: fastest(times) for size, times in found["seconds"].items()}
    row = {"device": "cuda" if gpu else "cpu", "fit": fit, "predicted": predicted, "best": best}
    old = tables.load_collectives() or {}
    table = {
        name: old.get(name, {}) | {str(ranks): value}
        for name, value in (row | {"seconds": found["seconds"]}).items()
    }
    tables.write(tables.collectives_key(), table)
    return table


def fastest(times: Mapping[str, float]) -> str:
    """The library, unless another algorithm is clearly faster."""
    name = min(times, key=lambda name: times[name])
    return name if times[name] < CLEARLY * times[LIBRARY] else LIBRARY


def fitted(found: dict[str, Any], ranks: int) -> dict[str, float]:
    """What messages cost, by those that `single_messages` found between `ranks` ranks of a machine. One alone takes
    alpha + bus_alpha + S beta, and m at once take alpha + m (bus_alpha + S bus_beta)."""
    (one_alpha, one_beta), (all_alpha, all_beta) = (line(found[name]) for name in ("pair", "ring"))
    bus_alpha = max(0.0, (all_alpha - one_alpha) / max(1, ranks - 1))
    return {
        "alpha": max(1e-9, one_alpha - bus_alpha),
        "beta": one_beta,
        "bus_alpha": bus_alpha,
        "bus_beta": max(all_beta, one_beta) / ranks,
        "gamma": found["gamma"],
    }


def line(points: list[list[float]]) -> tuple[float, float]:
    """(alpha, beta) with the least sum of squared relative errors."""
    sizes, seconds = np.array(points).T
    beta = max(1e-15, float(np.polyfit(sizes, seconds, 1, w=1 / seconds)[0]))
    alpha = float(np.average(seconds - beta * sizes, weights=1 / seconds**2))
    return (alpha, beta) if alpha > 0 else (min(y for _, y in points), beta)


def _measure_rank(sizes: Sequence[int], ranks: Ranks) -> dict[str, Any]:
    axis = everyone(ranks)
    return {"messages": single_messages(axis), "seconds": all_reduces(axis, sizes)}


def single_messages(axis: Axis) -> dict[str, Any]:
    """[bytes, seconds] of a message between two ranks (`pair`), of one from every rank to the next (`ring`). gamma:
    seconds per byte that is added."""
    n, r = axis.size, axis.index
    arena, other = (torch.zeros(ARENA // 4, device=axis.device) for _ in range(2))
    found: dict[str, Any] = {"pair": [], "ring": []}
    for size in MESSAGES:
        # The stretches of the arena (fp32), one after the other, again and again
        at = cycle(slice(start, start + size // 4) for start in range(0, len(arena), size // 4))

        def around(at=at) -> None:
            axis.start_moves([(arena[next(at)], (r + 1) % n)], [(other[next(at)], (r - 1) % n)])()

        pair = timed(lambda at=at: ping_pong(axis, arena[next(at)], 1), axis)
        found["pair"].append([size, pair / 2])
        found["ring"].append([size, timed(around, axis)])
    return found | {"gamma": timed(lambda: arena.add_(other), axis) / ARENA}


def all_reduces(axis: Axis, sizes: Sequence[int]) -> dict[str, dict[str, float]]:
    """Seconds of every all-reduce by size: the backend's own, and ours."""
    found = {}
    for size in sizes:
        x = torch.zeros(max(1, size // 4), device=axis.device)
        runs: dict[str, Callable[[], object]] = {LIBRARY: partial(axis.all_reduce, x)}
        for name, collective in collectives(shape_of(axis.size), size).items():
            runs[name] = partial(Executor(axis, collective), x)
        found[str(size)] = {name: timed(run, axis) for name, run in runs.items()}
    return found


def collectives(shape: Shape, size: int) -> dict[str, Collective]:
    """The all-reduces of `size` bytes that are possible, as training runs them."""
    return {
        name: build("all_reduce", name, shape._replace(pieces=pieces_of(made, size)))
        for name, made in ALGORITHMS["all_reduce"].items()
        if made.fits(shape) and not made.switches
    }


def ping_pong(axis: Axis, x: torch.Tensor, to: int) -> None:
    """A message from rank 0 to another, and back."""
    for source, target in ((0, to), (to, 0)):
        if axis.index == source:
            axis.start_send(x, target)()
        elif axis.index == target:
            axis.start_receive(x, source)()


def timed(run: Callable[[], object], axis: Axis, least: int = LEAST) -> float:
    """Median seconds of `run` in at least so many batches, of the slowest rank. All ranks run it equally often."""
    wait = torch.cuda.synchronize if axis.device.type == "cuda" else lambda: None
    run()
    wait()
    axis.barrier()
    start = time.perf_counter()
    run()
    wait()
    once = _slowest([time.perf_counter() - start], axis)[0]
    number = max(1, round(BATCH / once))
    batches = min(max(BATCHES, least), max(least, round(LONGEST / (number * once))))
    times = []
    for _ in range(batches):
        axis.barrier()
        start = time.perf_counter()
        for _ in range(number):
            run()
        wait()
        times.append((time.perf_counter() - start) / number)
    return median(_slowest(times, axis))


def _slowest(times: list[float], axis: Axis) -> list[float]:
    """The largest of all ranks' times, one by one."""
    found = torch.tensor(times, dtype=torch.float64, device=axis.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


LINKED = {4 << 10: 20, 64 << 10: 20, 512 << 10: 15, 8 << 20: 5}
"""Bytes of the whole tensor, and the number of repetitions."""
COMPUTING = 2e-3  # approximate seconds before each collective


def links(
    device: torch.device, sizes: Mapping[int, int] = LINKED, after_computing: bool = True
) -> tuple[dict[str, list[list[float]]], float]:
    """([bytes, seconds] by collective, share of a large message's time in which a rank's core is free)."""
    compute = _computing(device) if after_computing else lambda: None
    found: dict[str, list[list[float]]] = {}
    busy: list[float] = []
    for size, times in sizes.items():
        for name, work in _collectives(size, device).items():
            seconds, share = _timed_after(work, compute, times, device)
            found.setdefault(name, []).append([size, seconds])
            if size == max(sizes):
                busy.append(share)
    return found, max(0.0, 1.0 - median(busy))


def _collectives(size: int, device: torch.device) -> dict[str, Callable[[], object]]:
    n, rank = dist.get_world_size(), dist.get_rank()
    dtypes = {name: torch_dtype(name) for name in TRAINED}
    whole = {
        name: torch.zeros(size // dtype.itemsize // n * n, dtype=dtype, device=device)
        for name, dtype in dtypes.items()
    }
    part = {name: x[: len(x) // n] for name, x in whole.items()}
    out = torch.empty_like(whole["bf16"])
    rows = torch.empty(len(part["fp32"]), device=device)
    every = Axis("all", range(n), rank, device, dist.group.WORLD)

    def around() -> None:
        """Sends to the next rank, as in a ring; a pipeline's transfer is half of it."""
        ops = [
            dist.P2POp(dist.isend, whole["bf16"], (rank + 1) % n),
            dist.P2POp(dist.irecv, out, (rank - 1) % n),
        ]
        for transfer in dist.batch_isend_irecv(ops):
            transfer.wait()

    found: dict[str, Callable[[], object]] = {}
    for name, x in whole.items():
        sums = torch.empty_like(part[name])
        found[f"all_reduce {name}"] = lambda x=x: dist.all_reduce(x)
        found[f"reduce_scatter {name}"] = lambda x=x, sums=sums: reduce_scatter_single(sums, x)
    return found | {
        "all_gather": lambda: all_gather_single(whole["bf16"], part["bf16"]),
        "all_to_all": lambda: every.all_to_all(whole["bf16"]),
        "scatter_gradients": lambda: every.sum_scatter(whole["fp32"], rows, torch.float32),
        "send": around,
    }


def _timed_after(
    work: Callable[[], object], compute: Callable[[], object], times: int, device: torch.device
) -> tuple[float, float]:
    """(mean seconds of work after compute, minus compute alone; this rank's processor time in work, as a share). The
    longest tenth is left out, since it comes from other processes."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    laps: dict[bool, list[float]] = {False: [], True: []}
    cpu: dict[bool, float] = {}
    for sends in (True, False):
        for index in range(times + 2):
            if index == 2:
                wait()
                dist.barrier()
                cpu[sends] = -time.process_time()
            start = time.perf_counter()
            compute()
            if sends:
                work()
            wait()
            laps[sends].append(time.perf_counter() - start)
        cpu[sends] += time.process_time()
    both, alone = (fmean(sorted(laps[sends][2:])[: max(1, times * 9 // 10)]) for sends in (True, False))
    seconds = max(both - alone, 1e-6)
    return seconds, min(1.0, max(0.0, (cpu[True] - cpu[False]) / (seconds * times)))


def _computing(device: torch.device) -> Callable[[], object]:
    """Matmuls that take about COMPUTING seconds, the same number on all ranks."""
    x = torch.randn(128, 256, device=device)
    w = torch.randn(256, 256, device=device)
    began = time.perf_counter()
    for _ in range(20):
        torch.mm(x, w)
    count = torch.tensor(20 * COMPUTING / (time.perf_counter() - began), device=device)
    dist.all_reduce(count, dist.ReduceOp.MIN)
    products = max(1, int(count))

    def compute() -> None:
        for _ in range(products):
            torch.mm(x, w)

    return compute
