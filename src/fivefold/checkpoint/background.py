"""Writing a checkpoint beside the training.

A thread first copies what a rank owns to host memory, then writes the copies. What an update changes stays as it is
until the next update. So the copy overlaps with the forward and backward of the next step, and the step waits only
before its update, if the copy is not complete by then. On GPUs a stream of its own copies into pinned memory, and the
device waits for it, not the host.

The thread sends no messages. The ranks agree on what became of their parts between steps (`train/saver.py`), and the
first rank's thread sees by the files that all parts are written.
"""

from __future__ import annotations

import mmap
import threading
import time
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fivefold.checkpoint.write import Pieces, Writing

POLL_S = 0.02
"""Between two looks of the first rank for the others' parts."""


class Background:
    """One save on its way. `writing.begin` has been called, on all ranks.

    written: this rank's part is written, or failed. ended: the first rank has finished, too. error: why it failed.
    """

    def __init__(self, writing: Writing):
        self.writing = writing
        self.error: BaseException | None = None
        self.written, self.ended, self.cancelled = threading.Event(), threading.Event(), threading.Event()
        self._copy = Copy(writing.pieces)
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait_for_copy(self) -> float:
        """Waits until what is saved may change. Returns the seconds that the host waited."""
        begin = time.perf_counter()
        self._copy.wait()
        return time.perf_counter() - begin

    def cancel(self) -> None:
        """The first rank does not wait for the other ranks' parts any more."""
        self.cancelled.set()

    def join(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        writing = self.writing
        try:
            replace(writing, pieces=self._copy.run()).write_part()
            self.written.set()
            if writing.first and self._all_written():
                writing.finish()
        except BaseException as error:  # whatever it is, all ranks have to learn of it
            self.error = error
        finally:
            self._copy.done.set()
            self.written.set()
            self.ended.set()

    def _all_written(self) -> bool:
        """Waits for the other ranks' parts; False if it is cancelled meanwhile. Each part is looked for until it is
        there, and then no more: on a disk in a network that is a message."""
        for rank in range(self.writing.axis.size):
            while not self.writing.wrote(rank):
                if self.cancelled.wait(POLL_S):
                    return False
        return not self.cancelled.is_set()


class Copy:
    """A copy of pieces in host memory. On GPUs it begins now; on CPUs `run` makes it."""

    def __init__(self, pieces: Pieces):
        self.pieces, self.done = pieces, threading.Event()
        tensors = [piece.tensor for owned in pieces.values() for piece in owned]
        self.hosts = _hosts(tensors)
        self.event: torch.cuda.Event | None = None
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        if devices:
            (device,) = devices
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                for tensor, host in zip(tensors, self.hosts, strict=True):
                    host.copy_(tensor.detach(), non_blocking=True)
                self.event = torch.cuda.Event()
                self.event.record(side)

    def run(self) -> Pieces:
        """The pieces with tensors in host memory, once they are copied."""
        if self.event is not None:
            self.event.synchronize()
        else:
            tensors = (piece.tensor for owned in self.pieces.values() for piece in owned)
            for tensor, host in zip(tensors, self.hosts, strict=True):
                np.copyto(
                    _bits(host), _bits(tensor.detach())
                )  # numpy: on one core, without the interpreter's lock
        self.done.set()
        left = iter(self.hosts)
        return {
            kind: [replace(piece, tensor=next(left)) for piece in owned]
            for kind, owned in self.pieces.items()
        }

    def wait(self) -> None:
        """Returns when the tensors may change: on a GPU for what is queued after this call."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        else:
            self.done.wait()


def _hosts(tensors: list[Tensor]) -> list[Tensor]:
    """Room for a copy of each tensor: pinned for those on a GPU, otherwise in one mapping, which goes back to the
    system with the last of them."""
    if any(tensor.is_cuda for tensor in tensors):
        return [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    starts, size = [], 0
    for tensor in tensors:
        starts.append(size)
        size += -(-tensor.nbytes // 64) * 64
    content = mmap.mmap(-1, max(1, size))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        content.madvise(mmap.MADV_HUGEPAGE)
    return [
        torch.frombuffer(content, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)
        if tensor.numel()
        else torch.empty_like(tensor)
        for tensor, start in zip(tensors, starts, strict=True)
    ]


def _bits(tensor: Tensor) -> np.ndarray:
    """The same memory as numbers of a type that numpy has."""
    return tensor.view(_BITS[tensor.element_size()]).numpy()


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
