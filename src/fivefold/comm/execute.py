"""Runs a collective of `schedules/collectives` on the ranks of an axis, round by round.

    ring = Executor(axis, build("all_reduce", "ring", axis.size))
    ring(gradients)  # the sum of every rank's, in place

Sums are added in the order of the schedule, so they have the same bits every time and on every rank (`prove`).

`Scheduled` sums gradients so, by the algorithm that `layout.all_reduce` names, beside the computation; or it gathers
and scatters what ZeRO divides (`layout.all_gather`, `layout.reduce_scatter`). Each round of a schedule needs the one
before, so something must drive the rounds while backward computes. On CPUs it is a thread. It runs the schedules in the
order in which they were started, which is the same on all ranks, and it sends over a process group of its own, so no
other message comes in between. On GPUs it is a stream.

Legend: n ranks; d0 first dim of a tensor; elements count from the start of the flat tensor that a rank works in.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.comm.axis import Axis, Started
from fivefold.comm.progress import Handle, Work, progress
from fivefold.errors import CommunicationError
from fivefold.schedules.collectives import Collective, Primitive, prove
from fivefold.schedules.collectives.collective import messages_of
from fivefold.schedules.collectives.registry import ALL_REDUCES, AUTO, LIBRARY, Best, chosen

TABLE = 64  # most sizes of a measured table
Job = tuple[Callable[[], object], Future[None]]


class Scratch:
    """Memory that executors use one after the other. It grows to what the largest needs."""

    def __init__(self, device: torch.device):
        self.device, self._by_dtype = device, dict[torch.dtype, Tensor]()

    def of(self, size: int, dtype: torch.dtype) -> Tensor:
        """At least so many elements."""
        found = self._by_dtype.get(dtype)
        if found is None or len(found) < size:
            found = self._by_dtype[dtype] = torch.empty(size, dtype=dtype, device=self.device)
        return found

    def kept(self) -> list[Tensor]:
        return list(self._by_dtype.values())


class Executor:
    """Runs one collective on one axis. scratch: shared with other executors; None: its own.

    Which tensors a rank gives and gets:

    - all-reduce, broadcast, reduce: x, in place (after a reduce, only the root's is the sum; the others' are partial);
    - all-gather, gather: gives (d0, ...), gets (n d0, ...), by rank; after a gather, only the root's is complete;
    - reduce-scatter, scatter: gives (n d0, ...), which it uses up, gets (d0, ...); in a scatter, only the root's
      matters;
    - all-to-all: gives and gets (n d0, ...), by rank;
    - send: as broadcast, but only the rank after the root gets it;
    - barrier: any tensor, which stays as it is.

    A switch of the collective is a rank more on the axis; what it gives does not count.
    """

    def __init__(self, axis: Axis, collective: Collective, scratch: Scratch | None = None):
        assert axis.size == collective.members, (
            f"{collective.members} ranks on axis {axis.name} of {axis.size}"
        )
        prove(collective)
        self.axis, self.collective, self.scratch = axis, collective, scratch or Scratch(axis.device)

    def reserve(self, size: int, dtype: torch.dtype) -> None:
        """Prepares for messages of `size` elements."""
        self.scratch.of(messages_of(self.collective, self.axis.index, size).scratch, dtype)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Runs the collective. x: contiguous. out: the result of a gather or scatter, contiguous; None: a new one."""
        primitive, n = self.collective.primitive, self.axis.size
        if n == 1:
            return x
        if primitive == "barrier":
            self._run(torch.zeros(1, dtype=torch.uint8, device=self.axis.device))
            return x
        if primitive in ("all_gather", "gather"):
            out = x.new_empty(n * x.shape[0], *x.shape[1:]) if out is None else out
            out.view(n, -1)[self.axis.index] = x.view(-1)
            self._run(out.view(-1))
            return out
        if primitive in ("reduce_scatter", "scatter"):
            assert x.shape[0] % n == 0, f"{x.shape[0]} rows over {n} ranks"
            self._run(x.view(-1))
            part = x.view(n, x.shape[0] // n, *x.shape[1:])[self.axis.index]
            return part if out is None else out.copy_(part)
        if primitive == "all_to_all":
            return self._all_to_all(x)
        self._run(x.view(-1) if self.axis.index < self.collective.ranks else x.zero_().view(-1))
        return x

    def _all_to_all(self, x: Tensor) -> Tensor:
        """Works in one tensor: what this rank has for each (n parts), what it gets from each, and what passes by."""
        n, index = self.axis.size, self.axis.index
        assert x.shape[0] % n == 0, f"{x.shape[0]} rows over {n} ranks"
        part = x.numel() // n
        places = messages_of(self.collective, index, x.numel()).places
        work = x.new_empty(max(stop for _, stop in places.values()))
        work[: x.numel()] = x.view(-1)
        self._run(work, x.numel())
        out = work[x.numel() : 2 * x.numel()]
        out[index * part : (index + 1) * part] = x.view(-1)[index * part : (index + 1) * part]
        return out.view(x.shape)

    def _run(self, work: Tensor, size: int | None = None) -> None:
        for _ in self.rounds(work, size):
            pass

    def rounds(self, work: Tensor, size: int | None = None) -> Iterator[int]:
        """Goes through this rank's rounds in place, and yields after each, from 0: what has arrived can be used while
        the others are still to come. work: flat. size: elements of the message, if not those of `work`."""
        whole = work.numel() if size is None else size
        steps, _, most = messages_of(self.collective, self.axis.index, whole)
        scratch = self.scratch.of(most, work.dtype)
        for number, (sends, receives) in enumerate(steps):
            for message in sends:
                if message.packed:
                    parts = [work[a:b] for a, b in message.spans]
                    torch.cat(parts, out=scratch[slice(*message.packed)])
            leaving, arriving = (
                [
                    (work[slice(*m.spans[0])] if m.packed is None else scratch[slice(*m.packed)], m.peer)
                    for m in side
                ]
                for side in (sends, receives)
            )
            self.axis.start_moves(leaving, arriving)()
            for message in receives:
                at = message.packed[0] if message.packed else 0
                for start, stop in message.spans if message.packed else ():
                    arrived, at = scratch[at : at + stop - start], at + stop - start
                    if message.reduce:
                        work[start:stop].add_(arrived)
                    else:
                        work[start:stop].copy_(arrived)
            yield number


class Scheduled:
    """Sums, or gathers or scatters (`primitive`), over one axis.

    beside: where schedules run. local: the axis' ranks on each node. best: see `registry.chosen`. open: the recipe left
    the algorithm open.
    """

    def __init__(
        self,
        beside: Beside,
        name: str = LIBRARY,
        local: int = 0,
        best: Best | None = None,
        open: bool = False,
        primitive: Primitive = "all_reduce",
    ):
        self.axis, self.name, self.local, self.best, self.open = beside.axis, name, local, best, open
        self.primitive: Primitive = primitive
        self.scratch = beside.scratch
        self.by_size: dict[int, str] = {}  # the algorithm for messages of so many bytes
        self._executors: dict[Collective, Executor] = {}
        self._beside = beside

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

    def start(self, x: Tensor, purpose: str = "", out: Tensor | None = None) -> Started:
        """Starts the sum of every rank's x (contiguous), in place; or a gather or scatter of it into `out`, for which
        the library's own is not here (see `Executor`). purpose: see `Axis`."""
        axis = self.axis.for_purpose(purpose) if purpose else self.axis
        size, result = (x.numel(), x) if out is None else (max(x.numel(), out.numel()), out)
        run = self._executor(size, x.dtype)
        if run is None:
            assert out is None, f"{self.primitive} of the library"
            return axis.start_all_reduce(x)
        run.reserve(size, x.dtype)
        operation, watch = f"{self.primitive} by {run.collective.algorithm}", progress.watch
        started, began = Started.here(axis, operation, result), watch.clock() if watch else 0.0
        started.work = self._beside.start(partial(run, x, out), x, result)
        if watch:
            started.work = watch.follow(axis, operation, started.work, began)
        return started

    def _executor(self, size: int, dtype: torch.dtype) -> Executor | None:
        """Runs the schedule for tensors of this size; None: the library does it."""
        nbytes = size * dtype.itemsize
        schedule = chosen(self.name, self.axis.size, self.local, nbytes, self.best, self.primitive)
        self.by_size[nbytes] = LIBRARY if schedule is None else schedule.algorithm
        if schedule is None:
            return None
        if schedule not in self._executors:
            self._executors[schedule] = Executor(self.axis, schedule, self.scratch)
        return self._executors[schedule]


class Beside:
    """Runs functions that send over an axis, one after the other, beside the computation. The axis has a process group
    that nothing else uses. scratch: memory of those that run schedules."""

    def __init__(self, axis: Axis):
        self.axis, self.scratch = axis, Scratch(axis.device)
        self._queue: SimpleQueue[Job | None] | None = None
        self._stream: torch.cuda.Stream | None = None

    def start(self, run: Callable[[], object], *read: Tensor) -> Work | None:
        """Starts `run`, which uses the tensors `read`. None: it is done."""
        if self.axis.device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(self.axis.device)
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run()
            for x in read:
                x.record_stream(self._stream)
            event = torch.cuda.Event()
            event.record(self._stream)
            return Handle(lambda: torch.cuda.current_stream().wait_event(event))
        if dist.get_backend(self.axis.group) == "fake":  # a trace, which sees what this thread does
            run()
            return None
        if self._queue is None:
            self._queue = SimpleQueue()
            name = f"sums {self.axis.name}"
            threading.Thread(target=_work, args=(self._queue,), name=name, daemon=True).start()
            weakref.finalize(self, self._queue.put, None)
        done = Future[None]()
        self._queue.put((run, done))
        return Handle(done.result)


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
