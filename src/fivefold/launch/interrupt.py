"""Handles Ctrl-C, SIGTERM and a closed terminal: finish the step, save, exit; and the table of exit codes. No torch."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

PATIENCE_S = 5  # a launcher repeats the signal that the terminal sent; both count as one


DONE, FAILED, USER, BUSY, STOPPED, HUNG = 0, 1, 2, 74, 75, 76
# Of `fivefold train`, of its ranks and of the other commands.
CODES = {
    DONE: "the last step was reached",
    FAILED: "a rank failed and the run could not be restarted, or a check failed",
    USER: "an error that the user can fix; trying again does not help",
    BUSY: "a full disk, a folder in use, a host or site that does not answer: trying again may help",  # EX_IOERR
    STOPPED: "stopped by a signal with everything saved: start it again to go on",  # EX_TEMPFAIL of sysexits.h
    HUNG: "of a rank: a message did not end; its launcher restarts all ranks",
}


def unsaved(number: int) -> int:
    """The code of a run that this signal stopped before everything was saved."""
    return 128 + number


def in_words(code: int) -> str:
    """How a process ended, such as "SIGKILL" or "exit code 1". Python gives a signal as a negative code."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def stopping_signals() -> list[int]:
    """The signals that stop a run. An ignored SIGHUP, as under nohup, stays ignored."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *[signal.SIGHUP] * (not ignored)]


class Interrupt:
    """Inside the block, SIGINT, SIGTERM and SIGHUP only set `signal` and print `message`.

    A SIGINT more than PATIENCE_S after the first aborts at once. A signal that came to the block around this one counts
    here, too. Outside the main thread this does nothing, because Python allows no handlers there.

    noted: called with each signal's number."""

    def __init__(self, message: str = "", noted: Callable[[int], None] | None = None) -> None:
        self.message, self.noted = message, noted
        self.signal: int | None = None
        self.impatient = False  # a second SIGINT came
        self._at = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            around = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
            for number in stopping_signals():
                self._before[number] = signal.signal(number, self._note)
            if isinstance(around, Interrupt) and around.signal is not None and self.signal is None:
                self._note(around.signal, None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        around = getattr(self._before.get(signal.SIGTERM), "__self__", None)
        if isinstance(around, Interrupt) and around.signal is None and self.signal is not None:
            around.signal, around._at = self.signal, self._at

    def wanted(self) -> bool:
        return self.signal is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._at = number, now
            if self.message:
                say(self.message)
        elif number == signal.SIGINT and now - self._at > PATIENCE_S:
            self.impatient = True
            if self.noted is None:
                raise KeyboardInterrupt
        if self.noted is not None:
            self.noted(number)


def say(message: str) -> None:
    """Prints a line in a handler, where print() is not safe."""
    with contextlib.suppress(OSError):
        os.write(2, f"{message}\n".encode())


class Leaving(contextlib.ContextDecorator):
    """Inside the block, or a function with this decorator, a signal ends the command at once, with `code`. It is for
    the time when no step is trained: before the first one nothing is lost (STOPPED), after the last one the run is
    complete (DONE)."""

    def __init__(self) -> None:
        self.code = STOPPED
        self._before: dict[int, object] = {}

    def __enter__(self) -> Leaving:
        self.code = STOPPED
        _leaving.append(self)
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._leave) for number in stopping_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        _leaving.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self._before:
            atexit.register(ignore_signals)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        for other in self._before:
            signal.signal(other, signal.SIG_IGN)
        if self.code == STOPPED:
            say(f"stopped by {signal.Signals(number).name} before training; nothing is lost")
        raise SystemExit(self.code)


_leaving: list[Leaving] = []  # the commands that are under way in this process


def run_complete() -> None:
    """From now on a signal that ends the command does so with DONE."""
    for command in _leaving:
        command.code = DONE


def ignore_signals() -> None:
    """For a process that is about to exit: a signal in its last moments must not change its code."""
    for number in stopping_signals():
        signal.signal(number, signal.SIG_IGN)
