"""A message and the product beside it, in chunks, as data: the message of one chunk travels while another is multiplied
(Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS
2023). What is gathered is multiplied as it arrives; what is scattered leaves as it is computed.

`parallel/autograd.py` runs the actions; `plan` prices and draws them (`spans`).
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple


class Action(NamedTuple):
    """Something that is done with a chunk: its message starts, it is waited for, or the chunk is multiplied."""

    what: Literal["start", "wait", "multiply"]
    chunk: int


def actions(gathers: bool, chunks: int) -> tuple[Action, ...]:
    """In their order. gathers: the messages come before the product, one at a time, because of two at once both would
    arrive late; otherwise they carry its result."""
    found: list[Action] = []  # a compiler traces this
    for chunk in range(chunks):
        if not gathers:
            found += [Action("multiply", chunk), Action("start", chunk)]
            continue
        found.append(Action("start", chunk))
        if chunk:
            found.append(Action("multiply", chunk - 1))
        found.append(Action("wait", chunk))
    last = [Action("multiply", chunks - 1)] if gathers else [Action("wait", chunk) for chunk in range(chunks)]
    return (*found, *last)


@cache
def spans(gathers: bool, chunks: int) -> tuple[tuple[float, float], ...]:
    """The share of the product that is done when a chunk's message starts, and when it is waited for; of each chunk."""
    multiplied, done = 0, dict[Action, float]()
    for action in actions(gathers, chunks):
        multiplied += action.what == "multiply"
        done[action] = multiplied / chunks
    return tuple((done[Action("start", chunk)], done[Action("wait", chunk)]) for chunk in range(chunks))


def row_spans(results: bool, chunks: int, shared: float, backward: bool) -> tuple[tuple[float, float], ...]:
    """As `spans`, of experts' rows beside the shared expert, with this share of the work, and behind it the experts; in
    backward these come first. All rows leave at once; a chunk is waited for when experts compute it. results: these
    leave behind their chunk, and are waited for at the end. `parallel/expert.py` does so."""
    first = 0.0 if backward else shared
    done = [first + (1 - shared) * chunk / chunks for chunk in range(chunks + 1)]
    return tuple((done[i + 1], 1.0) if results else (0.0, done[i]) for i in range(chunks))
