"""What one rank sends and receives in a collective: messages with their places in memory, round by round.

The executor runs these (`comm/execute.py`), and the planner counts them.

Legend: n ranks. Elements count from the start of the flat tensor that a rank works in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from fivefold.schedules.collectives.collective import Collective, Move

Span = tuple[int, int]
"""(first element, element after the last)"""


@dataclass(frozen=True)
class Message:
    """What a rank sends to a peer in one round, or receives from it, to be added (`reduce`) or copied. spans: where it
    is in the work tensor. packed: its place in the scratch tensor, None if it is sent from or received into the work
    tensor itself."""

    peer: int
    spans: tuple[Span, ...]
    reduce: bool
    packed: Span | None

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(stop - start for start, stop in self.spans)


class Step(NamedTuple):
    """The messages of a rank in one round."""

    sends: list[Message]
    receives: list[Message]


class Messages(NamedTuple):
    """All messages of a rank in a collective. places: where each chunk is in the work tensor. scratch: elements of the
    scratch tensor."""

    steps: list[Step]
    places: dict[int, Span]
    scratch: int


@lru_cache(maxsize=1024)
def messages_of(collective: Collective, rank: int, size: int) -> Messages:
    """The messages of a rank. size: elements of the tensor that it gives; in an all-gather or gather, that it gets."""
    places, steps, most = _places(collective, rank, size), list[Step](), 0
    for group in collective.rows[rank]:
        used, step = 0, Step([], [])
        for receives, moves in enumerate((group.sends, group.receives)):
            parts: dict[tuple[int, bool], list[Move]] = {}
            for move in moves:
                parts.setdefault((move.source if receives else move.target, move.reduce), []).append(move)
            for (peer, reduce), own in parts.items():
                message = _message(places, peer, reduce, own, used, bool(receives))
                if message is not None:
                    step[receives].append(message)
                    used = message.packed[1] if message.packed else used
        if step.sends or step.receives:
            steps.append(step)
        most = max(most, used)
    return Messages(steps, places, most)


def _message(
    places: dict[int, Span], peer: int, reduce: bool, moves: Sequence[Move], used: int, receives: bool
) -> Message | None:
    """The message of some moves; None if it is empty. used: elements of scratch that others have taken."""
    spans: list[Span] = []
    for chunk in (chunk for move in moves for chunk in move.chunks):
        start, stop = places[chunk]
        if spans and spans[-1][1] == start:
            spans[-1] = spans[-1][0], stop
        elif start < stop:
            spans.append((start, stop))
    length = sum(b - a for a, b in spans)
    if not length:
        return None
    direct = len(spans) == 1 and not (receives and reduce)
    return Message(peer, tuple(spans), reduce, None if direct else (used, used + length))


def _places(x: Collective, rank: int, size: int) -> dict[int, Span]:
    """Where each chunk is in the work tensor."""
    n = x.ranks
    if x.primitive == "barrier":
        return dict.fromkeys(range(x.chunks), (0, 1))
    if x.primitive == "all_to_all":
        part, slots = size // n, 2 * n
        places = {}
        passing = {c for g in x.rows[rank] for m in (*g.sends, *g.receives) for c in m.chunks}
        for chunk in sorted(passing | {*x.holds(rank), *x.wants(rank)}):
            source, target = divmod(chunk, n)
            slot = target if source == rank else n + source if target == rank else slots
            slots += slot == slots
            places[chunk] = slot * part, (slot + 1) * part
        places[-1] = size, 2 * size  # what arrives is there even if nothing passes by
        return places
    blocks = n if x.primitive in ("all_gather", "gather", "reduce_scatter", "scatter") else 1
    part, width = size // blocks, x.chunks // blocks

    def bound(chunk: int, end: int) -> int:
        block, within = divmod(chunk, width)
        return block * part + (within + end) * part // width

    return {chunk: (bound(chunk, 0), bound(chunk, 1)) for chunk in range(x.chunks)}
