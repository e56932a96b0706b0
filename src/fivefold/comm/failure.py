"""The error text of a failed message: which rank waited, on which axis, for which operation, and at which line."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from fivefold.launch.verdict import backend_words

ROOM = str(Path(__file__).parent)
PACKAGE = Path(__file__).parents[1]
BACKENDS = ("gloo", "nccl", "timed out", "timeout", "connection", "peer", "socket")
"""Words in the errors of a backend. An error without any of them is a wrong call, and is not changed."""
WRONG = ("processgroupgloo::", "enforce fail", "invalid")
"""Words of a backend that refuses a wrong call: no rank is lost."""


class Place(NamedTuple):
    """A line of a function. The line is looked up only when needed: the lookup takes longer than a small message."""

    code: CodeType
    instruction: int

    def __str__(self) -> str:
        """`fivefold/step/step.py:148`. Files outside the package have their whole path."""
        lines = (line for start, end, line in self.code.co_lines() if start <= self.instruction < end)
        file = Path(self.code.co_filename)
        shown = file.relative_to(PACKAGE.parent) if file.is_relative_to(PACKAGE) else file
        return f"{shown}:{next(lines, self.code.co_firstlineno)}"


def caller() -> Place:
    """The innermost line outside of this folder."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(ROOM):
        frame = frame.f_back
    assert frame is not None
    return Place(frame.f_code, frame.f_lasti)


def verdict(
    what: str, timeout_s: float, waited: Place, started: Place | None, error: RuntimeError
) -> str | None:
    """The error text for a message, `what`, that raised `error` at `waited`. None: the call is wrong."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
    low = text.lower()
    if any(word in low for word in WRONG) or not any(word in low for word in BACKENDS):
        return None
    place = str(waited)
    if started is not None and str(started) != place:
        place = f"{started}, waited for at {place}"
    if "timed out" in low or "timeout" in low:
        said = f"timed out after {timeout_s:g} s: not all of these ranks took part"
    else:
        said = "failed: one of these ranks has ended, or cannot be reached"
    return f"{what}, at {place}, {said}. The backend said: {backend_words(error)}"
