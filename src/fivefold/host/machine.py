"""The machine of a run: settings of glibc (huge pages, freed blocks), the limits that a process may run into
(memory, open files), facts for machine.json and the report. torch is loaded only where a device is asked for."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fivefold import host
from fivefold.errors import UserError
from fivefold.host import control_groups, cores, cpu_model, memory_bytes, memory_limits

TUNABLES = "GLIBC_TUNABLES"
TUNED = {TUNABLES: "glibc.malloc.hugetlb=1:glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"}
"""Pages of 2 MiB instead of 4 KiB, where the kernel lets programs choose: large matrices then miss the address cache
less (benchmarks/train_speed.py). And no lists of small freed blocks: glibc cuts some off each aligned block. In a list
they do not join their neighbours again, so the next tensor of the same size does not fit."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_KEEP = 1 << 30


def restart_with_tuned_malloc() -> None:
    """Restarts this command in the same process with `TUNED`, which glibc reads only when a process starts. Returns if
    there is nothing to gain: another C library, or the user's own GLIBC_TUNABLES."""
    if platform.libc_ver()[0] == "glibc" and TUNABLES not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | TUNED)


def keep_few_primitives() -> None:
    """Lets oneDNN keep 128 compiled matmuls instead of 1024, unless the user says how many. Call it before the first.

    Experts that ranks share get other numbers of rows in each step. So each of their matmuls is compiled anew, and used
    once; 1024 of them take hundreds of megabytes. The matmuls whose shapes come again are fewer than 128 apart, also
    where a rank has all experts (`models.mixture.evened`).
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")


def let_segments_grow() -> None:
    """Lets PyTorch's allocator on GPUs grow and shrink its segments, unless the user has settings of their own. Call it
    before the first allocation.

    A segment of fixed size keeps the hole that a freed tensor leaves, and a larger tensor does not fit into it. A
    growing one is mapped page by page, so holes at its end are given back (ZeRO-R's M_D, arXiv 1910.02054).
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def keep_freed_memory() -> bool:
    """Keeps freed blocks of up to 1 GiB in the process. Returns False if the C library is not glibc.

    By default glibc returns every large freed block to the system and gets it again, page by page, a moment later. A
    training step allocates the same activations each time, so this only costs page faults.
    """
    return _mallopt(_M_MMAP_THRESHOLD, _KEEP) and _mallopt(_M_TRIM_THRESHOLD, _KEEP)


def keep_little_memory() -> bool:
    """For runs whose weights are in memory only while they compute (benchmarks/infinity.py). All threads share a heap,
    which keeps freed blocks, and blocks that do not fit into it go back to the system at once: those of 4 MiB and more,
    or of 1 MiB without `TUNED`, because the heap then has more holes. Returns False if the C library is not glibc."""
    least = 4 << 20 if os.environ.get(TUNABLES) == TUNED[TUNABLES] else 1 << 20
    return keep_freed_memory() and _mallopt(_M_MMAP_THRESHOLD, least) and _mallopt(_M_ARENA_MAX, 1)


def trim_memory() -> None:
    """Gives all whole pages of freed blocks back to the system, if the C library is glibc."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _mallopt(setting: int, value: int) -> bool:
    return platform.libc_ver()[0] == "glibc" and bool(ctypes.CDLL(None).mallopt(setting, value))


@dataclass(frozen=True)
class Limit:
    """The least of the limits on this machine's memory. shared: it is for all its processes together. held: bytes that
    count towards it now. what: its name."""

    bytes: int
    what: str
    shared: bool
    held: int


def limit() -> Limit | None:
    """The limit that memory runs into first: the control group's, `ulimit -v`, or the machine's. None where the system
    does not tell (not Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    resident, virtual = _own()
    found = [Limit(size, f"the memory limit of {path}", True, resident) for path, size in memory_limits()]
    if (most := address_space()) is not None:
        found.append(Limit(most, "ulimit -v", False, virtual))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found.append(Limit(total, "the machine's memory", True, resident))
    return min(found, key=lambda one: one.bytes)


def available() -> int | None:
    """Bytes that all processes of this machine, or of this control group, may still take together. None where the
    system does not tell."""
    found = []
    with suppress(OSError, ValueError, IndexError):
        words = Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()
        found.append(int(words[0]) << 10)
    for file, size in memory_limits():
        with suppress(OSError, ValueError):
            used = "memory.current" if file.name == "memory.max" else "memory.usage_in_bytes"
            stat = (file.parent / "memory.stat").read_text().split()
            found.append(
                size - int((file.parent / used).read_text()) + int(stat[stat.index("inactive_file") + 1])
            )
    if (most := address_space()) is not None:
        found.append(most - _own()[1])
    return max(0, min(found)) if found else None


def address_space() -> int | None:
    """Bytes of address space that a process may have (`ulimit -v`); None: without limit."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if most == resource.RLIM_INFINITY else most


def little_space() -> str:
    """What to say where the limit of address space is too low; "" without one."""
    return "" if (most := address_space()) is None else (
        f"the limit of address space (ulimit -v) is too low: {most / 2**20:,.0f} MiB. Libraries, stacks of threads and "
        "arenas of the allocator count towards it beside tensors. Raise it, or remove it: ulimit -v unlimited"
    )  # fmt: skip


def require_space_for_torch() -> None:
    """Raises UserError: torch's libraries do not fit into the address space. Loading them could end without a word."""
    most, torch = address_space(), find_spec("torch")
    if most is not None and torch is not None and torch.origin is not None:
        libraries = (Path(torch.origin).parent / "lib").glob("*.so*")
        if _own()[1] + sum(file.stat().st_size for file in libraries) > most:
            raise UserError(little_space())


def oom_kills() -> int | None:
    """Number of processes of this control group that the system has killed because memory ran out; None if it does not
    say."""
    for file in ("memory.events", "memory.oom_control"):  # of cgroup v2 and v1
        for folder in control_groups("memory"):
            with suppress(OSError, ValueError):
                words = (folder / file).read_text().split()
                return int(words[words.index("oom_kill") + 1])
    return None


def _own() -> tuple[int, int]:
    """(resident, virtual) bytes of this process."""
    with suppress(OSError, ValueError):
        virtual, resident = Path("/proc/self/statm").read_text().split()[:2]
        page = os.sysconf("SC_PAGE_SIZE")
        return int(resident) * page, int(virtual) * page
    return 0, 0


LEAST, PER_RANK = 128, 8
"""Files that a process has open, and those for its connections to each other rank, in several groups."""


def ensure_open_files(ranks: int) -> None:
    """Raises the soft limit on open files as far as a rank of so many may need it. Raises UserError: the hard limit is
    too low for any run."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = float("inf") if hard == resource.RLIM_INFINITY else hard
    if most < LEAST:
        raise UserError(
            f"the limit of open files is {hard} (ulimit -n), and a run needs {LEAST}. Nearest valid: ulimit -n {LEAST}"
        )
    wanted = int(min(most, LEAST + PER_RANK * ranks))
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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
        words = Path("/proc/self/status").read_text().split()
        now, most = (int(words[words.index(key) + 1]) * 1024 for key in ("VmRSS:", "VmHWM:"))
        return now, most
    except (OSError, ValueError):  # not Linux: only the maximum is known, in bytes on a Mac, else in KiB
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return most, most


_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "sve", "sve2", "bf16")
TORCH = ("2.11", "2.15")
"""The oldest and the newest version of PyTorch that Fivefold was tried with (`make test-versions`)."""


def untried_torch(version: str) -> str:
    """A sentence if nobody has tried this version of PyTorch, such as "2.16.0+cpu"; "" if somebody has."""
    texts = (TORCH[0], version, TORCH[1])
    oldest, here, newest = (tuple(map(int, text.split("+")[0].split(".")[:2])) for text in texts)
    if oldest <= here <= newest:
        return ""
    return f"PyTorch {version} has not been tried; Fivefold was tested with {TORCH[0]} to {TORCH[1]}"


def describe() -> dict[str, Any]:
    """The machine as JSON values: processor, usable cores and memory, system, versions, GPUs, fast dtypes.

    Imports torch; does not start its threads. No host or user name: the report may be passed on.
    """
    import torch

    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus = [
        {"name": gpu.name, "memory_bytes": gpu.total_memory, "processors": gpu.multi_processor_count}
        for gpu in devices
    ]
    facts = {
        "cpu": cpu_model(),
        "cpu_features": [flag for flag in _FLAGS if flag in cpu_flags()],
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
        hip = torch.version.hip
        facts["accelerator"] = f"ROCm {hip}" if hip else f"CUDA {torch.version.cuda}"
    return facts


def has_fast_bf16(device: str = "cpu") -> bool:
    """True if `device` computes bf16 faster than fp32.

    CPUs need AVX512-BF16, AMX or Arm's BF16. GPUs, all that it sees, need NVIDIA's Ampere or later, or AMD's CDNA.
    """
    if device == "cpu":
        return has_cpu_bf16()
    import torch

    every = range(torch.cuda.device_count())  # ranks on different GPUs must agree
    return torch.version.hip is not None or all(torch.cuda.get_device_capability(i) >= (8, 0) for i in every)


def peak_memory_bytes(device: str = "cpu") -> int:
    """Peak memory of this process in bytes: resident memory on a CPU, the allocator's tensors on a GPU."""
    if device == "cpu":
        return resident_bytes()[1]
    import torch

    return torch.cuda.max_memory_allocated(device)
