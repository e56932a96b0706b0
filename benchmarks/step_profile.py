"""Where the time of one step goes, by operator and shapes, on one core: Fivefold or the yardstick of `best.py`.

    OMP_NUM_THREADS=1 GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python benchmarks/step_profile.py "common work" fivefold

The form is "fivefold", or one of `plain_best.choices`. The second line is the rate of a square bf16 product of 2048.
Page faults are printed: the profiler's own memory causes some, and then the operators that allocate look slow.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from statistics import median

import torch
from best import fivefold_step
from plain_best import plain_step
from shapes import SHAPES
from torch.profiler import ProfilerActivity, profile

from fivefold.host.memory import keep_freed_memory

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
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        for _ in range(STEPS):
            step()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    rows = found.key_averages(group_by_input_shape=True)
    spent, calls = Counter[str](), Counter[str]()
    for row in rows:
        what = f"{row.key} {[size for size in row.input_shapes if size]}"
        spent[what] += row.self_cpu_time_total / 1e3 / STEPS
        calls[what] += row.count // STEPS
    print(f"operators: {spent.total():.0f} ms a step, {faults // STEPS} page faults")
    for what, ms in spent.most_common(LINES):
        print(f"{ms:8.1f} ms {calls[what]:5}x  {what[:110]}")


def lap(work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
