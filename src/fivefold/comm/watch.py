"""Notes when the messages of a step begin and end, and when the step waits for them.

`watched.now` is a `Watch` while a step is measured (step/recorder.py), otherwise None: then each message costs one look
at it. Only messages that begin on the watched thread are noted. (Rounds of a sum that another thread drives are part of
that sum.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from fivefold.comm.progress import Label
from fivefold.schedules.timelines import COMPUTE, MESSAGE, WAIT, Span

UNIT = "FSDP2 unit"
"""Begins the purpose of a unit's messages; timelines leave it out."""


class Work(Protocol):
    """What a message is waited for by. It raises the backend's error."""

    def wait(self) -> Any: ...


class Handle:
    """A `Work` out of a function that waits."""

    def __init__(self, wait: Callable[[], object]):
        self.wait = wait


class _Watched:
    now: Watch | None = None


watched = _Watched()


class Watch:
    """The messages and waits of this thread, in seconds since `began`. Messages are named by their operation, what they
    are for (`Axis.purpose`), and what the rank computes when they begin (`during`)."""

    def __init__(self) -> None:
        self.began, self.during = time.perf_counter(), ""
        self.thread, self.spans = threading.get_ident(), list[Span]()

    def clock(self) -> float:
        return time.perf_counter() - self.began

    @property
    def here(self) -> bool:
        return threading.get_ident() == self.thread

    def follow(self, axis: Label, operation: str, work: Work | None, began: float) -> Work | None:
        """Wraps what a started message is waited for by. A thread waits for it, too, and notes its end."""
        if work is None or not self.here:
            return work
        what = axis.purpose.removeprefix(f"{UNIT} ") or self.during
        self.spans.append(
            Span(axis.name, MESSAGE, f"{operation}, {what}" if what else operation, began, -1.0)
        )
        return _Followed(self, work, len(self.spans) - 1)

    def end(self, number: int) -> None:
        """A message has ended."""
        self.spans[number] = self.spans[number].until(self.clock())

    def wait(self, number: int, began: float) -> None:
        """The rank has waited for a message since `began`."""
        if self.here:
            self.spans.append(Span(COMPUTE, WAIT, self.spans[number].name, began, self.clock()))

    def close(self) -> list[Span]:
        """All spans. Messages that are still under way end now."""
        now = self.clock()
        return [span if span.end >= 0 else span.until(now) for span in self.spans]


class _Followed:
    """A message that a thread of its own waits for. Some of gloo's can be waited for only once, so whoever else waits
    does so for the thread."""

    def __init__(self, watch: Watch, work: Work, number: int):
        self.watch, self.number, self.done = watch, number, Future[None]()
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def _run(self, work: Work) -> None:
        try:
            work.wait()
        except BaseException as error:
            self.watch.end(self.number)
            self.done.set_exception(error)
        else:
            self.watch.end(self.number)
            self.done.set_result(None)

    def wait(self) -> None:
        began = self.watch.clock()
        self.done.result()
        self.watch.wait(self.number, began)
