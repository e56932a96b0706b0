"""Ctrl-C, SIGTERM and a terminal that hangs up, while training: finish the step, save, leave."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType

PATIENCE_S = 5  # a launcher passes on the signal that the terminal has sent already: those count once


class Interrupt:
    """While it is entered, SIGINT, SIGTERM and SIGHUP only set `signal` (and print `message`). A SIGINT more than
    PATIENCE_S after the first aborts at once. A SIGHUP that is ignored, as under nohup, stays ignored. Does nothing
    outside the main thread, where Python allows no handlers."""

    def __init__(self, message: str = "") -> None:
        self.message = message
        self.signal: int | None = None
        self._at = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
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
            if self.message:
                with contextlib.suppress(OSError):
                    os.write(2, f"{self.message}\n".encode())  # print() is not safe in a handler
        elif number == signal.SIGINT and now - self._at > PATIENCE_S:
            raise KeyboardInterrupt
