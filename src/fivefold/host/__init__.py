"""Facts about the processor, and the cores and memory that this process may use. No torch.

The limits of a container or a batch system count, not the whole machine. More threads would slow each other down.
"""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

_V1_MEMORY = "memory/memory.limit_in_bytes"


def cores() -> int:
    """Cores that this process may use: the smaller of its affinity mask and its cgroup's quota, at least 1."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(usable, _cgroup_cpus())))


def memory_bytes() -> int:
    """Bytes of memory that this process may use: the machine's, or its cgroup's limit if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_number(folder / name) for folder in _cgroups() for name in ("memory.max", _V1_MEMORY)]
    limits.append(_number(Path("/sys/fs/cgroup/memory") / _own_cgroup("memory") / "memory.limit_in_bytes"))
    return int(min(total, *(limit for limit in limits if limit), math.inf))


def machine_id() -> bytes:
    """An id that is equal for all processes of this machine (and container), and different elsewhere."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text() if boot.is_file() else ''}".encode()


def cpu_model() -> str:
    """The processor's name, with its family and model number, since cloud machines shorten the name."""
    fields = cpuinfo()
    name = fields.get("model name") or platform.processor() or platform.machine()
    number = "-".join(fields[key] for key in ("cpu family", "model") if key in fields)
    return f"{name} ({number})" if number else name


def cpuinfo() -> dict[str, str]:
    """The first processor's entry of /proc/cpuinfo, or {} without that file."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _cgroups() -> list[Path]:
    """Folders with this process's limits: its own cgroup (version 2) and all above it."""
    root = Path("/sys/fs/cgroup")
    try:
        own = next(
            line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")
        )
    except (OSError, StopIteration):
        return [root]
    folder = root / own[3:].lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]


def _own_cgroup(controller: str) -> str:
    """The path of this process's cgroup (version 1) of a controller; "" if there is none."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    rows = (line.split(":", 2) for line in lines)
    return next((path.lstrip("/") for _, names, path in rows if controller in names.split(",")), "")


def _cgroup_cpus() -> float:
    """CPUs that cgroup quotas leave (version 2: cpu.max, 1: cpu.cfs_quota_us); infinity without a quota."""
    shares = [math.inf]
    for folder in _cgroups():
        try:
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                shares.append(int(quota) / int(period))
        except (OSError, ValueError):
            pass
    quota = _number(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
    period = _number(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us"))
    if quota and period and quota > 0:
        shares.append(quota / period)
    return min(shares)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
