"""How long collectives between local ranks take, by size, and how much of that time the processor is free.

They are measured as training has them, each after a moment of computing: ranks then do not come to it at the same time,
and threads that wait for messages have fallen asleep. One after the other they take a fraction of that.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from statistics import fmean, median

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.parallel.sequence import gather_single, scatter_single
from fivefold.parallel.zero import ReduceScatter

SIZES = {4 << 10: 20, 64 << 10: 20, 512 << 10: 15, 8 << 20: 5}
"""Bytes of the whole tensor, and how often each is sent."""
COMPUTING = 2e-3  # seconds, about, before each collective


def links(
    device: torch.device, sizes: Mapping[int, int] = SIZES, after_computing: bool = True
) -> tuple[dict[str, list[list[float]]], float]:
    """By collective [bytes, seconds]; and the share of the time of large ones in which a rank's core was free."""
    compute = _computing(device) if after_computing else lambda: None
    found: dict[str, list[list[float]]] = {}
    busy: list[float] = []
    for size, times in sizes.items():
        for name, work in _collectives(size, device).items():
            seconds, share = _timed(work, compute, times, device)
            found.setdefault(name, []).append([size, seconds])
            if size == max(sizes):
                busy.append(share)
    return found, max(0.0, 1.0 - median(busy))


def _collectives(size: int, device: torch.device) -> dict[str, Callable[[], object]]:
    n, rank = dist.get_world_size(), dist.get_rank()
    whole = {name: _zeros(size, n, dtype, device) for name, dtype in _DTYPES.items()}
    part = {name: x[: len(x) // n] for name, x in whole.items()}
    out = torch.empty_like(whole["bf16"])
    rows, scatter = torch.empty(len(part["fp32"]), device=device), ReduceScatter(torch.float32)
    group, total = dist.group.WORLD, dist.ReduceOp(dist.ReduceOp.SUM)
    assert group is not None

    def around() -> None:
        """Each to the next one, as in a ring; half of it is what a pipeline does."""
        ops = [
            dist.P2POp(dist.isend, whole["bf16"], (rank + 1) % n),
            dist.P2POp(dist.irecv, out, (rank - 1) % n),
        ]
        for transfer in dist.batch_isend_irecv(ops):
            transfer.wait()

    found: dict[str, Callable[[], object]] = {
        f"all_reduce {name}": lambda x=x: dist.all_reduce(x) for name, x in whole.items()
    }
    for name, x in whole.items():
        mine = torch.empty_like(part[name])
        found[f"reduce_scatter {name}"] = lambda x=x, mine=mine: scatter_single(mine, x)
    return found | {
        "all_gather": lambda: gather_single(whole["bf16"], part["bf16"]),
        "all_to_all": lambda: dist.all_to_all_single(out, whole["bf16"]),
        "scatter_gradients": lambda: scatter(rows, whole["fp32"], group, total),
        "send": around,
    }


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _zeros(size: int, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(size // dtype.itemsize // n * n, dtype=dtype, device=device)


def _timed(
    work: Callable[[], object], compute: Callable[[], object], times: int, device: torch.device
) -> tuple[float, float]:
    """Mean seconds of work after compute, less those of compute alone; and the processor time of this rank over the
    time, in work. The longest tenth is left out: others on this machine, not the ranks themselves."""
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
    """Products that take about COMPUTING, equally many on all ranks."""
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


def disk(size: int = 64 << 20) -> float:
    """bytes/s written to the working folder's disk, until they are there."""
    block = os.urandom(1 << 20)
    with tempfile.NamedTemporaryFile(dir=".") as file:
        began = time.perf_counter()
        for _ in range(size >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return size / (time.perf_counter() - began)
