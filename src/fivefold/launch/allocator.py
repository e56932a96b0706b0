"""Tells glibc's allocator to keep freed memory.

By default glibc returns every large freed block to the system and gets it again, page by page, a moment later. A
training step allocates the same activations each time, so this only costs page faults.
"""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEEP = 1 << 30


def keep_freed_memory() -> bool:
    """Keeps freed blocks of up to 1 GiB in the process. Returns False if the C library is not glibc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, _KEEP)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEEP))
