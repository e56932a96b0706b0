"""Stand-ins for the streams and events of `torch.cuda`, which note what runs before what.

A stream is a queue: its operations run in the order in which the host queues them, beside those of other streams unless
one waits for the other. Each has a count, which goes up whenever somebody may begin to wait for it, and a vector clock
(Mattern 1989): for each stream, the count up to which its operations run before the next operation of this one. So an
operation is a pair (stream, count), as in FastTrack (Flanagan and Freund, PLDI 2009).

The host is one more stream. What it has waited for runs before all that it queues later. NCCL has a stream per group,
and one per peer for sends and receives. A collective waits for the stream that starts it, and `Work.wait` makes the
current stream wait for the collective. Autograd's engine, which is C++, runs a node of backward on the stream of its
forward: guard.cpp keeps the current stream. Where streams meet in backward, the engine's own waits are not seen.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import fivefold
from fivefold.comm.progress import Place

Clock = dict[int, int]
ROOM = os.path.dirname(__file__)
PACKAGE = os.path.dirname(fivefold.__file__) + os.sep  # the trainer's
HOST = -1
"""The number of the host among streams."""


class Stream:
    """Stands for `torch.cuda.Stream`. name: as errors say it."""

    device_index, device_type = 0, 1  # FSDP2 hands them on since torch 2.15, and `stream_id`

    def __init__(self, streams: Streams, number: int, name: str) -> None:
        self.streams, self.stream_id, self.name, self.device = streams, number, name, streams.device
        self.clock: Clock = {number: 1}

    def point(self) -> Clock:
        """What has run once all has run that is queued here now."""
        point = dict(self.clock)
        self.clock[self.stream_id] += 1
        return point

    def follow(self, point: Clock) -> None:
        """What is queued here from now on runs after this point."""
        clock = self.clock
        for number, count in point.items():
            if count > clock.get(number, 0):
                clock[number] = count

    def is_capturing(self) -> bool:
        return False

    def wait_stream(self, other: Stream) -> None:
        self.follow(other.point())

    def wait_event(self, event: Event) -> None:
        self.follow(event.point)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.streams)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.streams.reach(self.point(), "stream")


class Event:
    """Stands for `torch.cuda.Event`. Waiting for one that was never recorded waits for nothing, as in CUDA."""

    def __init__(self, streams: Streams, *_: Any, **__: Any) -> None:
        self.streams = streams
        self.point: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.point = (stream or self.streams.current()).point()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.streams.current()).wait_event(self)

    def synchronize(self) -> None:
        self.streams.reach(self.point, "event")


class Streams:
    """All streams of one GPU. waited: is called with a name whenever the host waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.waited = device, nobody
        self.host = Stream(self, HOST, "the host")
        self._all: list[Stream] = []
        self._nccl: dict[str, Stream] = {}
        self.default = self._add("the default stream")
        guard = ctypes.PyDLL(None)  # in this process, see gpu.py
        self._number, self._exchange = guard.fivefold_stream, guard.fivefold_exchange_stream

    def new(self, *_: Any, **__: Any) -> Stream:
        """Stands for `torch.cuda.Stream(...)`."""
        where = str(place(within="")).rpartition("site-packages/")[2]
        return self._add(f"stream {len(self._all)} of {where}")

    def nccl(self, group: str) -> Stream:
        """Of a group, or of a peer in it."""
        if group not in self._nccl:
            self._nccl[group] = self._add(f"NCCL's stream of {group}")
        return self._nccl[group]

    def current(self, device: object = None) -> Stream:
        return self._all[self._number()]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[Stream]:
        before = self._exchange(stream.stream_id)
        try:
            yield stream
        finally:
            self._exchange(before)

    def reach(self, point: Clock, name: str = "") -> None:
        """The host waits for this point. name: of what it calls, if it is none of the operators."""
        for stream in (self.host, *self._all):
            stream.follow(point)
        if name:
            self.waited(name)

    def synchronize(self, device: object = None) -> None:
        self.reach({stream.stream_id: stream.point()[stream.stream_id] for stream in self._all}, "device")

    def arrived(self, work: Any, timeout: object = None) -> bool:
        """Stands for `Work.wait`."""
        kept = work.get_future().value()
        if isinstance(kept, tuple):  # by `Races.send`; else it was sent before the trace
            self.current().follow(kept[1])
        return True

    def _add(self, name: str) -> Stream:
        stream = Stream(self, len(self._all), name)
        stream.follow(self.host.clock)
        self._all.append(stream)
        return stream


def nobody(name: str) -> None:
    """Hears of what the host waits for outside of a trace."""


def place(within: str = PACKAGE) -> Place | None:
    """The innermost line of these files outside of traces; None: autograd runs it, on a thread of its own."""
    frame = sys._getframe(1)
    while frame and (not (file := frame.f_code.co_filename).startswith(within) or file.startswith(ROOM)):
        frame = frame.f_back
    return frame and Place(frame.f_code, frame.f_lasti)
