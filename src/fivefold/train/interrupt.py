"""Ctrl-C and SIGTERM while training: finish the step, save, leave."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

PATIENCE_S = 5  # a launcher passes on the signal that the terminal has sent already: those count once


class Interrupt:
    """While it is entered, SIGINT and SIGTERM only set `signal`. A SIGINT more than PATIENCE_S after the first
    aborts at once. Does nothing outside the main thread, where Python allows no handlers."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._at = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def wanted(self) -> bool:
        return self.signal is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._at = number, now
        elif number == signal.SIGINT and now - self._at > PATIENCE_S:
            raise KeyboardInterrupt
