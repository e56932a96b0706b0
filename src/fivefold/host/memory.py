"""Memory settings of this process on glibc: huge pages, and keeping freed blocks. No torch."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path

TUNABLES = "GLIBC_TUNABLES"
HUGE_PAGES = {TUNABLES: "glibc.malloc.hugetlb=1"}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEEP = 1 << 30


def restart_with_huge_pages() -> None:
    """Restarts this command in the same process with memory pages of 2 MiB instead of 4 KiB, where glibc can do that.

    Large matrices then miss the address cache less (benchmarks/train_speed.py). glibc reads the setting only when a
    process starts. Returns if there is nothing to gain: another C library, a kernel without the choice, or the user's
    own GLIBC_TUNABLES.
    """
    choice = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if platform.libc_ver()[0] != "glibc" or TUNABLES in os.environ or not choice.is_file():
        return
    if "[madvise]" in choice.read_text():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | HUGE_PAGES)


def keep_freed_memory() -> bool:
    """Keeps freed blocks of up to 1 GiB in the process. Returns False if the C library is not glibc.

    By default glibc returns every large freed block to the system and gets it again, page by page, a moment later. A
    training step allocates the same activations each time, so this only costs page faults.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, _KEEP)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEEP))
