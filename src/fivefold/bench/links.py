"""Measures how long collectives between local ranks take, by size, and how much of that time the processor is free.

Each collective follows a moment of computing, as in training: ranks then arrive at different times, and threads that
wait for messages have fallen asleep. Back-to-back collectives take a fraction of that time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import fmean, median

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.comm import Axis
from fivefold.comm.axis import all_gather_single, reduce_scatter_single
from fivefold.precision import TRAINED, torch_dtype

SIZES = {4 << 10: 20, 64 << 10: 20, 512 << 10: 15, 8 << 20: 5}
"""Bytes of the whole tensor, and the number of repetitions."""
COMPUTING = 2e-3  # approximate seconds before each collective


def links(
    device: torch.device, sizes: Mapping[int, int] = SIZES, after_computing: bool = True
) -> tuple[dict[str, list[list[float]]], float]:
    """([bytes, seconds] by collective, share of a large message's time in which a rank's core is free)."""
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
    dtypes = {name: torch_dtype(name) for name in TRAINED}
    whole = {name: _zeros(size, n, dtype, device) for name, dtype in dtypes.items()}
    part = {name: x[: len(x) // n] for name, x in whole.items()}
    out = torch.empty_like(whole["bf16"])
    rows, every = (
        torch.empty(len(part["fp32"]), device=device),
        Axis("all", range(n), rank, device, dist.group.WORLD),
    )

    def around() -> None:
        """Sends to the next rank, as in a ring; a pipeline's transfer is half of it."""
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
        found[f"reduce_scatter {name}"] = lambda x=x, mine=mine: reduce_scatter_single(mine, x)
    return found | {
        "all_gather": lambda: all_gather_single(whole["bf16"], part["bf16"]),
        "all_to_all": lambda: every.all_to_all(whole["bf16"]),
        "scatter_gradients": lambda: every.sum_scatter(whole["fp32"], rows, torch.float32),
        "send": around,
    }


def _zeros(size: int, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(size // dtype.itemsize // n * n, dtype=dtype, device=device)


def _timed(
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
