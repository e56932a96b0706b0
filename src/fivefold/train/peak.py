"""How fast the hardware multiplies matrices: the denominator of MFU. No torch at module level.

MFU (PaLM, arXiv 2204.02311, appendix B) divides a model's FLOP/s by the device's dense peak. For the GPUs in
`devices.SHEETS` that is the vendor's figure. A processor has no honest data-sheet figure (its clock depends on the
cores and instructions in use), so its rate is measured once and cached; so is that of an unlisted GPU. It is the rate
of the fastest matmul that there is: in fp32 on CPUs that of the trainer (oneDNN) or PyTorch's own (MKL).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fivefold.errors import UserError
from fivefold.files import cache_folder, locked, make_folder, write_atomically
from fivefold.host import cores, cpu_model
from fivefold.host.devices import sheet_of
from fivefold.precision import DTYPES, MASTER, torch_dtype

MULTIPLIED = tuple(dtype.name for dtype in DTYPES.values() if dtype.multiplied)

UNDISTURBED = 0.93
"""Share of its cores' time. A measurement that got less was disturbed by other processes."""
_RATES = "matmul_rates.json"
_DISTURBED_S = 600.0
"""A disturbed rate is kept for so long. Then the next run measures again, and the best counts."""


def device_peak(device: str, dtype: str) -> float:
    """Dense peak of one device in FLOP/s: on a CPU of all cores that this process may use.

    device: `cpu`, `cuda`, `cuda:1`; dtype: `fp32`, `bf16`, `fp16` or `tf32`.
    """
    if device == "cpu":
        return matmul_rate(dtype, cores())
    import torch

    name = torch.cuda.get_device_name(device)
    if listed := listed_peak(name, dtype):
        return listed
    return _cached(f"{name} | torch {torch.__version__} | {dtype}", lambda: _measure(device, dtype, 1))


def listed_peak(name: str, dtype: str) -> float | None:
    """The data sheet's dense peak in FLOP/s of the GPU that calls itself `name`; None: not known."""
    sheet = sheet_of(name)
    return sheet.rate(dtype) if sheet else None


def matmul_rate(dtype: str, threads: int, improve: bool = False) -> float:
    """FLOP/s of dense square matrix products on `threads` cores of this processor, cached or measured now.

    The measurement (about 3 s with start-up) runs in a process of its own, so the caller's OpenMP threads are
    not started and it may fork afterwards. Several processes may call at once: one measures, the others read.
    improve: a cached rate whose measurement was disturbed by other processes is measured again. Only the process that
    starts the ranks asks for it, before it does so.
    Raises: UserError for an unknown dtype or threads < 1.
    """
    if dtype not in MULTIPLIED or threads < 1:
        allowed = f"{', '.join(MULTIPLIED)}; threads >= 1"
        raise UserError(f"matmul rate: dtype {dtype!r}, threads {threads}; allowed: {allowed}")
    return _cached(_key(dtype, threads), lambda: measure_apart(dtype, threads), improve)


def busy_share(device: str, dtype: str) -> float | None:
    """The share of the cores' time with which the cached rate of a CPU was measured, if others disturbed that."""
    share = _read(cache_folder() / _RATES).get(_key(dtype, cores()), {"share": 1.0})["share"]
    return share if device == "cpu" and share < UNDISTURBED else None


def _key(dtype: str, threads: int) -> str:
    return f"{cpu_model()} | {cores()} cores | torch {version('torch')} | {dtype}, fastest lap | {threads} threads"


def measure_apart(dtype: str, threads: int) -> dict[str, Any]:
    """`_measure` on the CPU in a new process, whose threads may use every core of this one."""
    unset = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "OMP_PROC_BIND",
        "OMP_PLACES",
        "GOMP_CPU_AFFINITY",
        "KMP_AFFINITY",
    )
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    environment |= {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-P", "-m", "fivefold.train.peak", dtype, str(threads)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _measure(device: str, dtype: str, threads: int) -> dict[str, Any]:
    """Multiply for about a second per way: {rate: FLOP/s, size, share: of the cores' time that this process got}."""
    import torch

    from fivefold.kernels.matmul import linear

    on_cpu = device == "cpu"
    if on_cpu:
        torch.set_num_threads(threads)
    wait = (lambda: None) if on_cpu else (lambda: torch.cuda.synchronize(device))
    best: dict[str, Any] = {"rate": 0.0}
    for size in (1024, 2048) if on_cpu else (4096, 8192):
        x, weight = (torch.randn(size, size, device=device).to(torch_dtype(dtype)) for _ in range(2))
        ways: list[Callable[[], object]] = [lambda x=x, weight=weight: linear(x, weight)]
        if on_cpu and dtype == MASTER:
            ways.append(lambda x=x, weight=weight: x @ weight.T)
        seconds = 0.0
        for way in ways:
            with torch.no_grad():
                for _ in range(2):
                    way()
                    wait()
                # The fastest: the peak falls as little as can be if others take the cores
                times, had = laps([way], wait, 0.5, 3)
            seconds, share = min(times), had / threads
            if 2 * size**3 / seconds > best["rate"]:
                best = {"rate": 2 * size**3 / seconds, "size": size, "share": share}
        if seconds > 0.25:  # a dtype without hardware: the larger size would take many seconds
            break
    return best


def laps(
    work: Sequence[Callable[[], object]], wait: Callable[[], object], seconds: float, least: int
) -> tuple[list[float], float]:
    """Seconds of pieces of work that take turns for so many `seconds`, at least `least` times; and the cores that this
    process had meanwhile."""
    times: list[float] = []
    began, cpu = time.perf_counter(), time.process_time()
    while len(times) < least or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        work[len(times) % len(work)]()
        wait()
        times.append(time.perf_counter() - start)
    return times, (time.process_time() - cpu) / (time.perf_counter() - began)


def _cached(key: str, measure: Callable[[], dict[str, Any]], improve: bool = False) -> float:
    """The rate under `key` in the cache's file; measured, and written for the next time, if it is missing.

    improve: measure again what was disturbed some time ago.
    """
    path = cache_folder() / _RATES
    known = _read(path).get(key)
    if known and not (
        improve and known["share"] < UNDISTURBED and abs(time.time() - known.get("at", 0)) > _DISTURBED_S
    ):
        return known["rate"]
    try:
        make_folder(path.parent)
        with locked(path.with_suffix(".lock")):
            records = _read(path)
            if records.get(key) != known:  # another process measured while this one waited
                return records[key]["rate"]
            new = measure()
            best = max((record for record in (known, new) if record), key=lambda record: record["rate"])
            records[key] = {**best, "share": new["share"], "at": time.time()}
            write_atomically(path, json.dumps(records, indent=1))
            return records[key]["rate"]
    except OSError:  # a cache that cannot be written is no reason not to train
        return known["rate"] if known else measure()["rate"]


def _read(path: Path) -> dict[str, Any]:
    """The cache's records; a missing or broken file is an empty cache."""
    try:
        records = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    good = isinstance(records, dict) and all(
        isinstance(record, dict) and {"rate", "share"} <= record.keys() for record in records.values()
    )
    return records if good else {}


if __name__ == "__main__":
    print(json.dumps(_measure("cpu", sys.argv[1], int(sys.argv[2]))))
