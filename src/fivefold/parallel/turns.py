"""Two computations that take turns: a forward and a backward of a pipeline's pair (`Schedule.pairs`).

Each has a thread, and only one of them runs at a time. It gives way where it would wait for experts' rows, whether or
not they have arrived. So the order of all messages depends on the program alone, and is the same on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore


class Turns:
    """`both` runs two computations, and `give_way` hands over within them. Outside of `both` it does nothing.

    start: called first on the second computation's thread.
    """

    def __init__(self, start: Callable[[], object] = lambda: None):
        self._start, self._thread = start, ThreadPoolExecutor(1, "turns")
        self._gates = Semaphore(0), Semaphore(0)
        self._running: int | None = None  # None: not within `both`, or one has ended
        self._seconds, self._since = [0.0, 0.0], 0.0

    def both(self, first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
        """Runs both, the first one up to its first message first. Returns the seconds that each had its turn."""
        self._running, self._seconds, self._since = 0, [0.0, 0.0], time.perf_counter()
        other = self._thread.submit(self._second, second)
        try:
            first()
        finally:
            self._end(0)
            other.result()
        return self._seconds[0], self._seconds[1]

    def give_way(self) -> None:
        """Lets the other computation run until it gives way or ends."""
        me = self._running
        if me is not None:
            self._hand_over(me)
            self._gates[me].acquire()

    def _second(self, compute: Callable[[], object]) -> None:
        self._gates[1].acquire()
        try:
            self._start()
            compute()
        finally:
            self._end(1)

    def _end(self, me: int) -> None:
        self._count(me)
        if self._running is not None:  # the other one has not ended
            self._running = None
            self._gates[1 - me].release()

    def _hand_over(self, me: int) -> None:
        self._count(me)
        self._running = 1 - me
        self._gates[1 - me].release()

    def _count(self, me: int) -> None:
        now = time.perf_counter()
        self._seconds[me] += now - self._since
        self._since = now
