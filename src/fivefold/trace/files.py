"""Stand-ins for the files of `layout.offload` in a trace: of any size, and nothing is read or written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fivefold.parallel.offload import disk


class HollowFile(disk.File):
    """A file whose bytes are a hollow tensor. It takes no room on the disk."""

    def __init__(self, owner: disk.Disk, size: int, what: str):
        self.disk, self.size, self.what = owner, size, what
        self.flat = torch.empty(size, dtype=torch.uint8)

    def drop(self) -> None: ...
    def read(self, offset: int, into: Tensor) -> None: ...
    def write(self, offset: int, data: Tensor) -> None: ...
    def close(self) -> None: ...


@contextmanager
def hollow_files() -> Iterator[None]:
    """Files that are made inside are hollow. Enter `Hollowing` where they are made."""
    real, disk.File = disk.File, HollowFile
    try:
        yield
    finally:
        disk.File = real
