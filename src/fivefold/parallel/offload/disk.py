"""The disk as a tier of memory: unnamed files, direct asynchronous I/O, and counts of what it cost.

Direct I/O (O_DIRECT) leaves nothing in the page cache, which would count as memory of a container. Each file can also
be mapped: its tensors serve initial values, checkpoints and whoever else asks for them once in a while. The two agree,
because the kernel writes changed pages back before a direct read, and drops them after a direct write.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.comm.progress import progress
from fivefold.errors import UserError
from fivefold.files import cache_folder, expanded, make_folder
from fivefold.kernels import private
from fivefold.schedules.timelines import COMPUTE, MESSAGE, WAIT
from fivefold.sharding.tiers import lane_of

Futures = list[Future[None]]
PAGE = 4096
THREADS = 4
"""Reads and writes under way at once."""
SPAN = 2 << 20
"""Bytes of one read or write of a tensor that is not aligned: they go through buffers of this size."""
MAPPED = 64 << 20
"""Bytes of mapped tensors that are written before their memory is given back."""


def folder_of(setting: str) -> Path:
    """The folder that `layout.offload_dir` names, or the default."""
    return expanded("layout.offload_dir", setting) if setting else cache_folder() / "offload"


class Meter:
    """What I/O has cost so far. busy: seconds in which any was under way. waited: seconds in which computing waited for
    it. read, written: bytes of files. All of it is also noted while a step is measured (`comm.progress.Watch`)."""

    def __init__(self) -> None:
        self.busy = self.waited = 0.0
        self.read = self.written = 0
        self._lock, self._under_way, self._began = threading.Lock(), 0, 0.0

    def begin(self) -> None:
        with self._lock:
            if self._under_way == 0:
                self._began = time.perf_counter()
            self._under_way += 1

    def end(self) -> None:
        with self._lock:
            self._under_way -= 1
            if self._under_way == 0:
                self.busy += time.perf_counter() - self._began

    def moved(self, link: str, out: bool, what: str, began: float, size: int) -> None:
        """Bytes have crossed a link since `began`, "disk" or "host" (see `tiers.Flow`)."""
        if link == "disk":
            with self._lock:
                self.read, self.written = self.read + size * (not out), self.written + size * out
        self.note(lane_of(link, out), MESSAGE, what, began, size)

    def wait(self, ready: Callable[[], Any], what: str) -> Any:
        """Calls `ready`, which waits for I/O, and counts the time. what: is waited for."""
        began = time.perf_counter()
        try:
            return ready()
        finally:
            self.waited += time.perf_counter() - began
            self.note(COMPUTE, WAIT, what, began)

    def note(self, lane: str, kind: str, what: str, began: float, size: int = 0) -> None:
        if (watch := progress.watch) is not None:  # threads of I/O go on when a measurement ends
            watch.note(lane, kind, what, began, size)

    def figures(self) -> dict[str, float]:
        return {"busy": self.busy, "waited": self.waited, "read": self.read, "written": self.written}


def alone() -> None:
    """Operations of this thread, beside computing, run on one core from now on, without a team of OpenMP threads. Those
    of several threads that run beside each other wait for each other, and spin meanwhile."""
    torch.get_num_threads()  # PyTorch sets the number of a new thread when it first needs it
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libgomp.so.1").omp_set_num_threads(1)  # the one that PyTorch has loaded


class Disk:
    """The files of one rank in `folder`, and the threads that read and write them."""

    def __init__(self, folder: Path):
        self.folder, self.meter = folder, Meter()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="offload", initializer=alone)
        self._own = threading.local()
        self.files: list[File] = []
        self._touched, self._under_way = 0, tuple[Any, ...]()
        self._streams: dict[bool, torch.cuda.Stream] = {}

    def file(self, size: int, what: str) -> File:
        """A new file of `size` bytes. what: names it in messages. Raises UserError: the folder cannot be written, or
        has not enough space."""
        made = File(self, -(-size // PAGE) * PAGE, what)
        self.files.append(made)
        return made

    def touched(self, size: int) -> None:
        """`size` bytes of mapped tensors were written. Now and then their memory is given back."""
        self._touched += size
        if self._touched >= MAPPED:
            self.drop()

    def drop(self) -> None:
        """Gives back the memory of mapped tensors."""
        self._touched = 0
        for file in self.files:
            file.drop()

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    def submit(self, work: Callable[..., object], *arguments: Any) -> Future[None]:
        """Runs `work` on one of the threads, or here if a trace sees this thread only. It counts as I/O."""
        if private.watched():
            self._under_way = arguments  # as if it lasted until the next one begins: their memory counts
            return at_once(self._run, work, *arguments)
        return self._pool.submit(self._run, work, *arguments)

    def start(
        self, here: Tensor, there: Tensor, out: bool, what: str, lane: bool | None = None
    ) -> Future[None]:
        """Starts a copy between the device (here) and host memory (there). out: away from the device. On a GPU it is
        queued behind what the current stream does so far, in one of two streams: `lane`, or one each way."""
        if not here.is_cuda:
            return self.submit(self.copy, here, there, out, what)
        lane = out if lane is None else lane
        stream = self._streams.get(lane) or self._streams.setdefault(lane, torch.cuda.Stream(here.device))
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            target, source = (there, here) if out else (here, there)
            target.copy_(source, non_blocking=True)
            here.record_stream(stream)
            return Copying(stream.record_event())

    def arrive(self, copies: Sequence[Future[None]], what: str) -> None:
        """Waits for copies: the current stream waits for those of a GPU's streams, else the host, which counts the
        time."""
        for each in copies:
            if isinstance(each, Copying):
                torch.cuda.current_stream().wait_event(each.event)
            else:
                self.meter.wait(each.result, what)

    def copy(self, here: Tensor, there: Tensor, out: bool, what: str) -> None:
        """Copies between the device (here) and host memory (there). out: away from the device."""
        began = time.perf_counter()
        target, source = (there, here) if out else (here, there)
        target.copy_(source)
        self.meter.moved("host", out, what, began, target.nbytes)

    def _run(self, work: Callable[..., object], *arguments: Any) -> None:
        self.meter.begin()
        try:
            with torch.no_grad():
                work(*arguments)
        finally:
            self.meter.end()

    def staging(self) -> Tensor:
        """An aligned buffer of this thread, of SPAN bytes."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = aligned(SPAN)
        return self._own.buffer

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._under_way = ()
        for file in self.files:
            file.close()
        self.files.clear()


class Copying(Future[None]):
    """A copy in a stream of a GPU. The host waits for its `result`, a stream by `Disk.arrive`."""

    def __init__(self, event: Any):
        super().__init__()
        self.event = event
        self.set_result(None)

    def result(self, timeout: float | None = None) -> None:
        self.event.synchronize()


class File:
    """An unnamed file; see `Disk.file`."""

    def __init__(self, disk: Disk, size: int, what: str):
        self.disk, self.size, self.what = disk, size, what
        try:
            make_folder(disk.folder)
            self._file, self.direct = _unnamed(disk.folder)
            if size:
                os.posix_fallocate(self._file, 0, size)
        except OSError as error:
            raise UserError(_why(disk.folder, size, what, error)) from None
        self._map, self.flat = None, torch.empty(0, dtype=torch.uint8)
        if size:  # reading and writing the bytes that are mapped goes through the page cache
            self._map = mmap.mmap(self._file, size)
            self.flat = torch.frombuffer(self._map, dtype=torch.uint8)

    def tensor(self, dtype: torch.dtype, count: int) -> Tensor:
        """The first elements of the file."""
        return self.flat[: count * dtype.itemsize].view(dtype)

    def drop(self) -> None:
        """Writes mapped pages that have changed, and gives back their memory."""
        if self._map is not None:
            self._map.flush()
            self._map.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def move(self, offset: int, memory: Tensor, out: bool) -> None:
        """Fills aligned bytes from a multiple of PAGE on, or writes them there (`out`). Blocks."""
        done, size, left, began = 0, memory.numel(), memory.numpy().data, time.perf_counter()
        while done < size:
            count = (os.pwritev if out else os.preadv)(self._file, [left[done:]], offset + done)
            if count <= 0:
                raise OSError(errno.EIO, f"{self.what}: the file ends at byte {offset + done}")
            done += count
        self.disk.meter.moved("disk", out, self.what, began, size)
        if not self.direct:  # a file system without direct I/O keeps what it has moved in the page cache
            os.posix_fadvise(self._file, offset, size, os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """Waits until all that was written is on the disk."""
        os.fsync(self._file)

    def start(self, offset: int, tensor: Tensor, out: bool) -> Futures:
        """Starts to fill a contiguous tensor from a byte of the file on, a multiple of PAGE, or to write it there
        (`out`); the caller keeps it until then."""
        flat = tensor.view(-1).view(torch.uint8)
        return [
            self.disk.submit(self._part, offset + first, flat[first : first + SPAN], out)
            for first in range(0, flat.numel(), SPAN)
        ]

    def _part(self, offset: int, part: Tensor, out: bool) -> None:
        size, staging = part.numel(), self.disk.staging()
        if out:
            staging[:size].copy_(part)
        self.move(offset, staging[: -(-size // PAGE) * PAGE], out)
        if not out:
            part.copy_(staging[:size])

    def close(self) -> None:
        os.close(self._file)  # the mapping lives until its last tensor is gone


def aligned(size: int) -> Tensor:
    """Bytes of memory (size) that begin at a page."""
    memory = torch.empty(size + PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE
    return memory[start : start + size]


def at_once(work: Callable[..., object], *arguments: Any) -> Future[None]:
    """Runs `work` in this thread. Returns what a thread would have."""
    done: Future[None] = Future()
    try:
        work(*arguments)
        done.set_result(None)
    except BaseException as error:
        done.set_exception(error)
    return done


def wait_for(futures: Sequence[Future[None]]) -> None:
    """Waits for I/O, and raises its error."""
    for future in futures:
        future.result()


def _unnamed(folder: Path) -> tuple[int, bool]:
    """A file without a name, and whether its I/O is direct."""
    flags = os.O_TMPFILE | os.O_RDWR
    try:
        return os.open(folder, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    return os.open(folder, flags, 0o600), False


def _why(folder: Path, size: int, what: str, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        found = os.statvfs(folder)
        free = found.f_bavail * found.f_frsize
        return (
            f"layout.offload_dir = {folder}: {what} need {size / 2**30:,.2f} GiB, and {free / 2**30:,.2f} GiB are free "
            "there. Nothing was trained yet. Free some space, or set layout.offload_dir to another disk"
        )
    return (
        f"layout.offload_dir = {folder}: cannot make a file there ({error.strerror}). Set it to a folder on a local "
        "disk that can be written"
    )
