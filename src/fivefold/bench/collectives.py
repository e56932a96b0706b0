"""Measures every all-reduce between local ranks, and fits alpha, beta and gamma to single messages.

The prediction is that of `schedules/collectives/cost.py` on local ranks that share the machine: alpha per message in a
row, and for each message the time for which it keeps the machine busy. It is fitted to messages between one pair of
ranks and around the ring, not to the collectives that it predicts.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from fivefold.comm import Axis, everyone
from fivefold.comm.execute import Executor
from fivefold.host import tables
from fivefold.launch.local import start_ranks
from fivefold.launch.ranks import Ranks
from fivefold.plan.topology import of_fit
from fivefold.schedules.collectives import ALGORITHMS, build, shape_of
from fivefold.schedules.collectives.choose import LIBRARY, pieces_of
from fivefold.schedules.collectives.cost import compare

SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20)
MESSAGES = (1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20)  # sizes of the messages that are fitted
ARENA = 32 << 20  # bytes that these messages go through one after the other, so that they come from memory
BATCH, BATCHES = 2e-3, 20  # seconds of a batch of runs at least, and their number; the median counts
LONGEST = 2.0  # seconds after which fewer batches suffice


def measure(
    ranks: int, sizes: Sequence[int] = SIZES, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Measures, saves and returns `fit`, `seconds` (by ranks, size and algorithm), `predicted` and `best`.

    The process must have used neither torch's threads nor a GPU: ranks are forked.
    """
    say(f"messages between {ranks} local ranks")
    gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory(prefix="fivefold-") as folder:
        file = Path(folder, "found.json")
        start_ranks(partial(_measure_rank, file, tuple(sizes)), ranks, fork=not gpu)
        found = json.loads(file.read_text())
    fit = fitted(found["pair"], found["ring"], ranks) | {"gamma": found["gamma"]}
    predicted = {
        str(size): {
            x.algorithm.name: x.cost.seconds for x in compare("all_reduce", of_fit(fit, ranks), size)[0]
        }
        for size in sizes
    }
    best = {size: min(times, key=times.get) for size, times in found["seconds"].items()}  # type: ignore[arg-type]
    table = tables.load_collectives() or {"seconds": {}, "predicted": {}, "best": {}}
    table["fit"] = fit
    for name, value in (("seconds", found["seconds"]), ("predicted", predicted), ("best", best)):
        table[name][str(ranks)] = value
    tables.save_collectives(table)
    return table


def fitted(pair: list[list[float]], ring: list[list[float]], ranks: int) -> dict[str, float]:
    """alpha, beta of one message at a time, and what each message takes of the machine that all share.

    pair, ring: [bytes, seconds] of one message at a time, and of one from every rank at once. A message alone takes
    alpha + bus_alpha + S beta, and n at once take alpha + n (bus_alpha + S bus_beta) if the machine is busy.
    """
    (one_alpha, one_beta), (all_alpha, all_beta) = _line(pair), _line(ring)
    bus_alpha = max(0.0, (all_alpha - one_alpha) / max(1, ranks - 1))
    return {
        "alpha": max(1e-9, one_alpha - bus_alpha),
        "beta": one_beta,
        "bus_alpha": bus_alpha,
        "bus_beta": max(all_beta, one_beta) / ranks,
    }


def _line(points: list[list[float]]) -> tuple[float, float]:
    """(alpha, beta) with the least sum of squared relative errors."""
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_size = sum(w * size for w, (size, _) in zip(weights, points, strict=True)) / total
    mean_seconds = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
    both = zip(weights, points, strict=True)
    slopes = [(w * (x - mean_size) * (y - mean_seconds), w * (x - mean_size) ** 2) for w, (x, y) in both]
    beta = max(1e-15, sum(a for a, _ in slopes) / sum(b for _, b in slopes))
    alpha = mean_seconds - beta * mean_size
    return (alpha, beta) if alpha > 0 else (min(y for _, y in points), beta)


def _measure_rank(file: Path, sizes: Sequence[int], ranks: Ranks) -> None:
    """Measures on every rank; the first writes what was found."""
    axis = everyone(ranks)
    found: dict[str, Any] = {"pair": [], "ring": [], "seconds": {}}
    arena, other = (torch.zeros(ARENA // 4, device=axis.device) for _ in range(2))
    for size in MESSAGES:
        count = size // 4
        starts = cycle(range(0, len(arena), count))
        n, r = axis.size, axis.index

        def around(starts=starts, count=count, n=n, r=r) -> None:
            here = slice(start := next(starts), start + count)
            axis.start_moves([(arena[here], (r + 1) % n)], [(other[here], (r - 1) % n)])()

        def there_and_back(starts=starts, count=count) -> None:
            _ping_pong(axis, arena[(start := next(starts)) : start + count])

        found["pair"].append([size, _timed(there_and_back, axis) / 2])
        found["ring"].append([size, _timed(around, axis)])
    found["gamma"] = _timed(lambda: arena.add_(other), axis) / ARENA
    for size in sizes:
        x = torch.zeros(max(1, size // 4), device=axis.device)
        runs: dict[str, Callable[[], object]] = {LIBRARY: partial(axis.all_reduce, x)}
        shape = shape_of(axis.size)
        for name, made in ALGORITHMS["all_reduce"].items():
            if made.fits(shape):
                pieces = pieces_of(made, size)
                runs[name] = partial(
                    Executor(axis, build("all_reduce", name, shape._replace(pieces=pieces))), x
                )
        found["seconds"][str(size)] = {name: _timed(run, axis) for name, run in runs.items()}
    if ranks.first:
        file.write_text(json.dumps(found))


def _ping_pong(axis: Axis, x: torch.Tensor) -> None:
    """A message from rank 0 to rank 1, and back."""
    for source in (0, 1):
        if axis.index == source:
            axis.start_send(x, 1 - source)()
        elif axis.index == 1 - source:
            axis.start_receive(x, source)()


def _timed(run: Callable[[], object], axis: Axis) -> float:
    """Median seconds of `run` in batches, of the slowest rank. All ranks do the same number of runs."""
    wait = torch.cuda.synchronize if axis.device.type == "cuda" else lambda: None
    run()
    wait()
    axis.barrier()
    start = time.perf_counter()
    for _ in range(3):
        run()
    wait()
    once = _slowest([(time.perf_counter() - start) / 3], axis)[0]
    number = max(1, round(BATCH / once))
    batches = min(BATCHES, max(5, round(LONGEST / (number * once))))
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
