"""Features of the processor, and the memory that this process holds. No torch, so it answers at once."""

from __future__ import annotations

import ctypes
import functools
import resource
import sys
from contextlib import suppress
from pathlib import Path

from fivefold import host


def cpu_flags() -> frozenset[str]:
    """Instruction-set flags as the kernel names them (`avx512_bf16`, `amx_bf16`, Arm: `bf16`)."""
    fields = host.cpuinfo()
    return frozenset((fields.get("flags") or fields.get("Features") or "").split())


def has_cpu_bf16() -> bool:
    """True if the processor multiplies bf16 matrices in hardware. Otherwise bf16 is slower than fp32."""
    return bool(cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"})


@functools.cache
def has_cpu_fp16() -> bool:
    """True if the processor multiplies fp16 matrices in hardware. Otherwise they are multiplied in fp32."""
    return bool(cpu_flags() & {"avx512_fp16", "amx_fp16"})


def resident_bytes() -> tuple[int, int]:
    """Resident memory of this process in bytes: (now, peak since it started or was forked)."""
    try:
        status = Path("/proc/self/status").read_text()
        found = dict(
            line.split(":", 1) for line in status.splitlines() if line.startswith(("VmHWM", "VmRSS"))
        )
        return tuple(int(found[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))  # type: ignore[return-value]
    except (OSError, KeyError):  # not Linux: only the maximum is known, in bytes on a Mac, else in KiB
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return most, most


def compute_alone() -> None:
    """Operations of this thread run on one core from now on, without a team of OpenMP threads. Those of several threads
    that run beside each other wait for each other, and spin meanwhile."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libgomp.so.1").omp_set_num_threads(1)  # the one that PyTorch has loaded
