"""Facts about the processor, and the cores and memory that this process may use. No torch.

The limits of a container or a batch system count, not the whole machine. More threads would slow each other down.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def cores() -> int:
    """Cores that this process may use: the smaller of its affinity mask and its cgroup's quota, at least 1."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares = [float(usable)]
    for folder in control_groups("cpu"):
        with suppress(OSError, ValueError):
            if (folder / "cpu.max").is_file():
                quota, period = (folder / "cpu.max").read_text().split()
            else:  # version 1
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if quota != "max" and int(quota) > 0 and int(period) > 0:
                shares.append(int(quota) / int(period))
    return max(1, int(min(shares)))


def memory_bytes() -> int:
    """Bytes of memory that this process may use: the machine's, or its cgroup's limit if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(size for _, size in memory_limits())])


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


def control_groups(controller: str) -> list[Path]:
    """Folders of this process's control groups that may limit `memory` or `cpu`: its own, and those around it. Version
    2 has one tree for all controllers, version 1 a tree for each."""
    folders: list[Path] = []
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = CGROUPS / controller if controllers else CGROUPS
            own = root / path.lstrip("/")
            folders += [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
    return folders or [CGROUPS, CGROUPS / controller]


def memory_limits() -> Iterator[tuple[Path, int]]:
    """(file, bytes) of each limit on the memory of this process's control groups."""
    for folder in control_groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # of version 2 and 1
            with suppress(OSError, ValueError):
                size = int((folder / name).read_text())  # version 2 says "max" if there is none
                if 0 < size < 1 << 60:
                    yield folder / name, size
