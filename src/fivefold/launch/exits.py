"""The exit codes of `fivefold train`, of its ranks and of the other commands: one table. No torch."""

from __future__ import annotations

from signal import Signals

DONE, FAILED, USER, BUSY, STOPPED, HUNG = 0, 1, 2, 74, 75, 76
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
    return Signals(-code).name if code < 0 else f"exit code {code}"
