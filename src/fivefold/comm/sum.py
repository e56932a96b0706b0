"""Sums tensors over an axis by the algorithm that `layout.all_reduce` names, beside the computation.

Each round of a schedule needs the one before, so something must drive the rounds while backward computes. On CPUs it is
a thread. It runs the sums in the order in which they were started, which is the same on all ranks, and it sends over a
process group of its own, so no other message comes in between. On GPUs it is a stream.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.comm.axis import Axis, Started, Work
from fivefold.comm.execute import Executor, Scratch
from fivefold.comm.watch import watched
from fivefold.errors import CommunicationError
from fivefold.schedules.collectives import Collective
from fivefold.schedules.collectives.choose import ALL_REDUCES, AUTO, LIBRARY, Best, chosen

TABLE = 64  # most sizes of a measured table
Job = tuple[Callable[[], object], Future[None]]


class Summation:
    """Sums over one axis.

    axis: with a process group that nothing else uses, unless `name` is "library". local: the axis' ranks on each node.
    best: see `choose.chosen`. open: the recipe left the algorithm open.
    """

    def __init__(
        self, axis: Axis, name: str = LIBRARY, local: int = 0, best: Best | None = None, open: bool = False
    ):
        self.axis, self.name, self.local, self.best, self.open = axis, name, local, best, open
        self.scratch = Scratch(axis.device)
        self.by_size: dict[int, str] = {}  # the algorithm for messages of so many bytes
        self._executors: dict[Collective, Executor] = {}
        self._beside = Beside(axis)

    def notes(self) -> list[str]:
        """What "auto" has chosen, for people; nothing if it is the library."""
        if not self.open or all(name == LIBRARY for name in self.by_size.values()):
            return []
        chosen = ", ".join(f"{size / 2**20:.3g} MiB by {name}" for size, name in sorted(self.by_size.items()))
        return [f'layout.all_reduce = "{AUTO}" over axis {self.axis.name}: {chosen}']

    def reserve(self, size: int, dtype: torch.dtype) -> None:
        """Prepares for tensors of `size` elements."""
        if (run := self._executor(size, dtype)) is not None:
            run.reserve(size, dtype)

    def start(self, x: Tensor, purpose: str = "") -> Started:
        """Starts the sum of every rank's x (contiguous), in place. purpose: see `Axis`."""
        run, axis = (
            self._executor(x.numel(), x.dtype),
            self.axis.for_purpose(purpose) if purpose else self.axis,
        )
        if run is None:
            return axis.start_all_reduce(x)
        run.reserve(x.numel(), x.dtype)
        operation, watch = f"all_reduce by {run.collective.algorithm}", watched.now
        started, began = Started.here(axis, operation, x), watch.clock() if watch else 0.0
        started.work = self._beside.start(partial(run, x), x)
        if watch:
            started.work = watch.follow(axis, operation, started.work, began)
        return started

    def _executor(self, size: int, dtype: torch.dtype) -> Executor | None:
        """Runs the schedule for tensors of this size; None: the library does it."""
        nbytes = size * dtype.itemsize
        schedule = chosen(self.name, self.axis.size, self.local, nbytes, self.best)
        self.by_size[nbytes] = LIBRARY if schedule is None else schedule.algorithm
        if schedule is None:
            return None
        if schedule not in self._executors:
            self._executors[schedule] = Executor(self.axis, schedule, self.scratch)
        return self._executors[schedule]


class Beside:
    """Runs functions that send over an axis, one after the other, beside the computation. The axis has a process group
    that nothing else uses."""

    def __init__(self, axis: Axis):
        self.axis = axis
        self._queue: SimpleQueue[Job | None] | None = None
        self._stream: torch.cuda.Stream | None = None

    def start(self, run: Callable[[], object], *read: Tensor) -> Work | None:
        """Starts `run`, which uses the tensors `read`. None: it is done."""
        if dist.get_backend(self.axis.group) == "fake":  # a trace, which sees what this thread does
            run()
            return None
        return self._on_stream(run, read) if self.axis.device.type == "cuda" else self._on_thread(run)

    def _on_thread(self, run: Callable[[], object]) -> _OnThread:
        if self._queue is None:
            self._queue = SimpleQueue()
            threading.Thread(
                target=_work, args=(self._queue,), name=f"sums {self.axis.name}", daemon=True
            ).start()
            weakref.finalize(self, self._queue.put, None)
        done = Future[None]()
        self._queue.put((run, done))
        return _OnThread(done)

    def _on_stream(self, run: Callable[[], object], read: Sequence[Tensor]) -> _OnStream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.axis.device)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        for x in read:
            x.record_stream(self._stream)
        done = torch.cuda.Event()
        done.record(self._stream)
        return _OnStream(done)


def agreed(local: int, best: Best, axis: Axis) -> tuple[int, Best]:
    """The first rank's (ranks per node, table) on all ranks of the axis. Those with others, as on nodes of unequally
    many ranks, would wait for other messages."""
    if dist.get_backend(axis.group) == "fake":  # a trace, with nobody to agree with
        return local, best
    rows = [(size, ALL_REDUCES.index(name)) for size, name in best.items() if name in ALL_REDUCES][:TABLE]
    table = torch.tensor([(local, 0), *rows] + [(0, 0)] * (TABLE - len(rows)), device=axis.device)
    (local, _), *rows = axis.broadcast(table, 0).tolist()
    return local, {size: ALL_REDUCES[name] for size, name in rows if size}


def _work(queue: SimpleQueue[Job | None]) -> None:
    """Runs jobs one after the other. After one has failed, all fail: the ranks no longer agree on what comes next."""
    failed: BaseException | None = None
    while (job := queue.get()) is not None:
        run, done = job
        try:
            if failed is None:
                run()
        except CommunicationError as error:
            failed = error.__cause__  # the backend's: who waits says where
        except BaseException as error:
            failed = error
        if failed is None:
            done.set_result(None)
        else:
            done.set_exception(failed)
        del run, done, job  # their tensors


class _OnThread:
    def __init__(self, done: Future[None]):
        self.done = done

    def wait(self) -> None:
        self.done.result()


class _OnStream:
    def __init__(self, done: torch.cuda.Event):
        self.done = done

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.done)
