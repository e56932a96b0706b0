"""Names of what a rank does, for the trace of PyTorch's profiler (`observe.profile_steps`).

While no profiler records, a span costs one look at `profiling.now`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch.profiler import record_function


class Label(Protocol):
    """What names a message: its axis, and what it is for (`Axis`)."""

    name: str
    purpose: str


class _Profiling:
    now = False


profiling = _Profiling()
"""`now` is True while a profiler records this process."""
_OFF = nullcontext()


def span(*words: object) -> AbstractContextManager[object]:
    """Inside the block, the profiler's trace has a range with this name."""
    return record_function(" ".join(map(str, words))) if profiling.now else _OFF


def message(operation: str, axis: Label, wait: bool = False) -> AbstractContextManager[object]:
    """The range of a message: of its start, or of a wait for it."""
    if not profiling.now:
        return _OFF
    begin, purpose = "wait for " * wait, f", {axis.purpose}" * bool(axis.purpose)
    return record_function(f"{begin}{operation} over {axis.name}{purpose}")
