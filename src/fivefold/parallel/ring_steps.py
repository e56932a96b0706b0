"""Two computations that take turns: a forward and a backward of a pipeline's pair (`Schedule.pairs`).

Each has a thread, and only one of them runs at a time. It gives way where it would wait for experts' rows, whether or
not they have arrived. So the order of all messages depends on the program alone, and is the same on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from threading import Semaphore


class Turns:
    """`both` runs two computations, and `give_way` hands over within them. Outside of `both` it does nothing.

    start: called first on the second computation's thread.
    """

    def __init__(self, start: Callable[[], object] = lambda: None):
        self._start, self._thread = start, ThreadPoolExecutor(1, "turns")
        self._running: int | None = None  # None: not within `both`, or one has ended
        self._error: BaseException | None = None  # the first one
        self._seconds, self._since = [0.0, 0.0], 0.0

    def both(self, first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
        """Runs both, the first one up to its first message first. Returns the seconds that each had its turn. An error
        of either ends both."""
        self._running, self._seconds, self._since = 0, [0.0, 0.0], time.perf_counter()
        self._gates = Semaphore(0), Semaphore(0)
        other = self._thread.submit(self._run, 1, second)
        self._run(0, first)
        other.result()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._seconds[0], self._seconds[1]

    def give_way(self) -> None:
        """Lets the other computation run until it gives way or ends. Raises CancelledError if it fails."""
        me = self._running
        if me is not None:
            self._hand_over(me)
            self._gates[me].acquire()
        if self._error is not None:
            raise CancelledError

    def _run(self, me: int, compute: Callable[[], object]) -> None:
        try:
            if me == 1:
                self._gates[1].acquire()
                self._start()
            if self._error is None:
                compute()
        except BaseException as error:  # the other one would wait for ranks that wait for this rank
            self._error = self._error or error
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
