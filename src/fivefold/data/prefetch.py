"""A background thread that keeps the next batches ready."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Calls fetch(start), fetch(start + 1), ... up to stop (endless if None), at most `depth` ahead.

    A thread is enough: reading memory-mapped tokens releases no lock for long, and a batch takes far less
    time than a step. Close it (or use `with`) so that the thread ends:

        with Prefetch(lambda i: batches.batch(i, rows), step) as ready:
            (inputs, targets), waited = ready.next()
    """

    def __init__(self, fetch: Callable[[int], T], start: int = 0, stop: int | None = None, depth: int = 2):
        self._fetch, self._next, self._stop_at = fetch, start, stop
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="fivefold-prefetch", daemon=True)
        self._thread.start()

    def next(self) -> tuple[T, float]:
        """The next batch and seconds waited for it. Raises what fetch raised, StopIteration at the end."""
        assert not self._closed.is_set(), "closed"
        began = time.perf_counter()
        batch, error = self._ready.get()
        if error is not None:
            self.close()
            raise error
        return batch, time.perf_counter() - began  # type: ignore[return-value]

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                if self._next == self._stop_at:
                    raise StopIteration
                item = (self._fetch(self._next), None)
            except BaseException as error:  # handed to the caller of next()
                item = (None, error)
            self._next += 1
            while not self._closed.is_set():
                try:
                    self._ready.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if item[1] is not None:
                return
