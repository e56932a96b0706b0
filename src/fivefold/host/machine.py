"""Facts about the machine of a run, for machine.json and the report: features of its processor, and the memory that the
run takes. torch is loaded only where its version or a device is asked for."""

from __future__ import annotations

import ctypes
import functools
import platform
import resource
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from fivefold import host
from fivefold.host import cores, cpu_model, memory_bytes


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


_NOTABLE_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_fp16",
    "sve",
    "sve2",
    "bf16",
)


TORCH = ("2.11", "2.15")
"""The oldest and the newest version of PyTorch that Fivefold was tried with (`make test-versions`)."""


def untried_torch(version: str) -> str:
    """A sentence if nobody has tried this version of PyTorch, such as "2.16.0+cpu"; "" if somebody has."""

    def number(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split("+")[0].split(".")[:2])

    oldest, newest = TORCH
    if number(oldest) <= number(version) <= number(newest):
        return ""
    return f"PyTorch {version} has not been tried; Fivefold was tested with {oldest} to {newest}"


def describe() -> dict[str, Any]:
    """The machine as JSON values: processor, usable cores and memory, system, versions, GPUs, fast dtypes.

    Imports torch; does not start its threads. No host or user name: the report may be passed on.
    """
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": found.name,
                "memory_bytes": found.total_memory,
                "processors": found.multi_processor_count,
            }
        )
    facts = {
        "cpu": cpu_model(),
        "cpu_features": [flag for flag in _NOTABLE_FLAGS if flag in cpu_flags()],
        "cores": cores(),
        "memory_bytes": memory_bytes(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fivefold": metadata.version("fivefold"),
        "gpus": gpus,
        "fast_bf16": has_fast_bf16("cuda" if gpus else "cpu"),
    }
    if gpus:
        facts["accelerator"] = (
            f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        )
    return facts


def has_fast_bf16(device: str = "cpu") -> bool:
    """True if `device` computes bf16 faster than fp32.

    CPUs need AVX512-BF16, AMX or Arm's BF16. GPUs need NVIDIA's Ampere or later, or AMD's CDNA.
    """
    if device == "cpu":
        return has_cpu_bf16()
    import torch

    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def peak_memory_bytes(device: str = "cpu") -> int:
    """Peak memory of this process in bytes: resident memory on a CPU, the allocator's tensors on a GPU."""
    if device == "cpu":
        return resident_bytes()[1]
    import torch

    return torch.cuda.max_memory_allocated(device)


def current_memory_bytes(device: str = "cpu") -> int:
    """The memory that this process holds now, as in `peak_memory_bytes`."""
    if device == "cpu":
        return resident_bytes()[0]
    import torch

    return torch.cuda.memory_allocated(device)
