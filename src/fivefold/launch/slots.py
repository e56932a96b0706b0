"""The places for ranks on this machine. A run gets fewer ranks when a place fails again and again or is needed for
something else, and more when it is there again. No torch."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from fivefold.errors import UserError

FILE = "slots"  # in the run folder; a number in it says how many ranks may run
FAILURES = 2  # in a row, without progress, until a slot is given up
LONGEST = 32  # bytes that are read of the file


def between(text: str) -> int | tuple[int, int]:
    """Reads `N` or `MIN:MAX`, numbers of ranks.

    Raises:
        UserError: it is neither.
    """
    least, colon, most = text.partition(":")
    numbers = [least, most] if colon else [least, least]
    if not all(n.isascii() and n.isdigit() and len(n) < 8 for n in numbers):
        raise UserError(
            f"--nproc {text[:40]}: must be a number of ranks, N, or the fewest and the most, MIN:MAX"
        )
    first, last = map(int, numbers)
    if not 1 <= first <= last:
        raise UserError(
            f"--nproc {text}: must be at least 1, and MIN at most MAX. Nearest valid: {max(1, last)}"
        )
    return (first, last) if colon else first


class Slots:
    """Slots 0 to `most` - 1, of which at least `least` are used. run: the run folder.

    A slot whose rank fails FAILURES times in a row without progress is given up, unless too few would be left. It is
    taken up again when the file in the run folder is written: somebody has looked at the machine.
    """

    def __init__(self, run: Path, least: int, most: int):
        self.file, self.least, self.most = run / FILE, least, most
        self.failed = (-1, 0)  # the slot that failed last, and how often in a row
        self.given_up: set[int] = set()
        self._found = self._read()

    def usable(self) -> tuple[int, ...]:
        """The slots for ranks, now."""
        if (found := self._read()) != self._found:
            self._found = found
            self.given_up.clear()
            self.failed = (-1, 0)
        slots = [slot for slot in range(self.most) if slot not in self.given_up]
        return tuple(slots[: max(self.least, found[0])])

    def fail(self, slot: int, progress: bool) -> bool:
        """The rank on a slot has failed. progress: the ranks have saved a step since the failure before. Returns True
        if the slot is given up."""
        before, times = self.failed
        times = times + 1 if slot == before and not progress else 1
        self.failed = slot, times
        if times < FAILURES or len(self.usable()) <= self.least:
            return False
        self.given_up.add(slot)
        self.failed = (-1, 0)
        return True

    def _read(self) -> tuple[int, int]:
        """The number in the file, and when it was written; all slots without one."""
        with suppress(OSError, ValueError):
            descriptor = os.open(self.file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                text, written = file.read(LONGEST).strip(), os.fstat(descriptor).st_mtime_ns
            if text.isdigit() and len(text) < LONGEST:
                return int(text), written
        return self.most, 0
