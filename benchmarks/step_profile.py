"""Where the time of one step goes, by operator and shapes, on one core: Fivefold or the yardstick of `best.py`.

    OMP_NUM_THREADS=1 GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python benchmarks/step_profile.py "common work" fivefold

The form is "fivefold", or one of `plain_best.choices`. The second line is the rate of a square bf16 product of 2048.
PyTorch knows the FLOPs of its own matmuls only: oneDNN's with a bias have no rate.
Page faults are printed: the profiler's own memory causes some, and then the operators that allocate look slow.
"""

from __future__ import annotations

import resource
import sys
import time
from statistics import median

import torch
from best import fivefold_step
from plain_best import plain_step
from shapes import SHAPES
from torch.profiler import ProfilerActivity, profile

from fivefold.host.machine import keep_freed_memory

LINES, STEPS, SIZE = 30, 2, 2048


def main() -> None:
    name, form = sys.argv[1:]
    keep_freed_memory()
    step = fivefold_step(SHAPES[name]) if form == "fivefold" else plain_step(SHAPES[name], form)
    seconds = median([lap(step) for _ in range(7)][4:])
    print(f"{name}, {form}, {torch.get_num_threads()} threads: {seconds * 1e3:.0f} ms")
    a = torch.randn(SIZE, SIZE).bfloat16()
    print(f"square product: {2 * SIZE**3 / median([lap(lambda: a @ a) for _ in range(9)]) / 1e9:.0f} GFLOP/s")
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True) as found:
        for _ in range(STEPS):
            step()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    rows = sorted(found.key_averages(group_by_input_shape=True), key=lambda row: -row.self_cpu_time_total)
    spent = sum(row.self_cpu_time_total for row in rows) / 1e3 / STEPS
    print(f"operators: {spent:.0f} ms a step, {faults // STEPS} page faults")
    for row in rows[:LINES]:
        ms, shapes = row.self_cpu_time_total / 1e3 / STEPS, [size for size in row.input_shapes if size]
        rate = f"{row.flops / row.self_cpu_time_total / 1e3:.0f} GFLOP/s" if row.flops else ""
        print(f"{ms:8.1f} ms {row.count // STEPS:5}x  {rate:11} {f'{row.key} {shapes}'[:100]}")


def lap(work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
