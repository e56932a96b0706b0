"""Handles Ctrl-C, SIGTERM and a closed terminal during training: finish the step, save, exit."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType

PATIENCE_S = 5  # a launcher repeats the signal that the terminal sent; both count as one


class Interrupt:
    """Inside the block, SIGINT, SIGTERM and SIGHUP only set `signal` and print `message`.

    A SIGINT more than PATIENCE_S after the first aborts at once. An ignored SIGHUP, as under nohup, stays ignored.
    Outside the main thread this does nothing, because Python allows no handlers there."""

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
