"""Measures the disk as offloading uses it: direct I/O by the threads of the engine's own `Disk`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fivefold.parallel.offload.disk import SPAN, Disk, aligned, wait_for

SIZE = 1 << 30
"""Of the file: a quarter of it was written 1.3 times as fast here, in a burst."""


def bandwidth(folder: Path, size: int = SIZE) -> dict[str, float]:
    """Bytes per second of an unnamed file in `folder`: "write" (flushed), "read", and "both" at once, together.

    size: bytes of the file, of which whole pairs of spans are used.

    Raises:
        UserError: the folder cannot be written, has not enough space, or is on a file system without unnamed files.
    """
    disk = Disk(folder)
    try:
        return _measured(disk, range(0, size // (2 * SPAN) * 2 * SPAN, SPAN))
    finally:
        disk.close()


def _measured(disk: Disk, spans: range) -> dict[str, float]:
    file, data = disk.file(len(spans) * SPAN, "a test file"), aligned(SPAN)
    data.copy_(torch.frombuffer(bytearray(os.urandom(SPAN)), dtype=torch.uint8))  # a disk may compress zeros

    def read(at: int) -> None:
        file.read(at, disk.staging())

    def write(at: int) -> None:
        file.write(at, data)

    def rate(*work: tuple[Callable[[int], None], int]) -> float:
        began = time.perf_counter()
        wait_for([disk.submit(one, at) for one, at in work])
        file.sync()
        return len(work) * SPAN / (time.perf_counter() - began)

    found = {"write": rate(*((write, at) for at in spans)), "read": rate(*((read, at) for at in spans))}
    halves = zip(spans[: len(spans) // 2], spans[len(spans) // 2 :], strict=True)
    return found | {"both": rate(*(one for a, b in halves for one in ((read, a), (write, b))))}
