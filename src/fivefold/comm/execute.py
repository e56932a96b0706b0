"""Runs a collective of `schedules/collectives` on the ranks of an axis, round by round.

    ring = Executor(axis, build("all_reduce", "ring", axis.size))
    ring(gradients)  # the sum of every rank's, in place

Sums are added in the order of the schedule, so they have the same bits every time and on every rank (`prove`).

Legend: n ranks; d0 first dim of a tensor; elements count from the start of the flat tensor that a rank works in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.comm.axis import Axis
from fivefold.schedules.collectives import Collective, Move, prove

Span = tuple[int, int]
"""(first element, element after the last)"""


@dataclass(frozen=True)
class _Message:
    """What a rank sends to a peer in one round, or receives from it, to be added (`reduce`) or copied. spans: where it
    is in the work tensor. packed: its place in the scratch tensor, None if it is sent from or received into the work
    tensor itself."""

    peer: int
    spans: tuple[Span, ...]
    reduce: bool
    packed: Span | None


Step = tuple[list[_Message], list[_Message]]
"""(sends, receives) of a round."""


class Executor:
    """Runs one collective on one axis. It keeps its buffers between calls with tensors of the same size and dtype.

    Which tensors a rank gives and gets:

    - all-reduce, broadcast, reduce: x, in place (after a reduce, only the root's is the sum; the others' are partial);
    - all-gather, gather: gives (d0, ...), gets (n d0, ...), by rank; after a gather, only the root's is complete;
    - reduce-scatter, scatter: gives (n d0, ...), gets (d0, ...); in a scatter, only the root's matters;
    - all-to-all: gives and gets (n d0, ...), by rank;
    - send: as broadcast, but only the rank after the root gets it;
    - barrier: any tensor, which stays as it is.
    """

    def __init__(self, axis: Axis, collective: Collective):
        assert axis.size == collective.ranks, f"{collective.ranks} ranks on axis {axis.name} of {axis.size}"
        prove(collective)
        self.axis, self.collective = axis, collective
        self._key: tuple[int, torch.dtype] | None = None
        self._steps: list[Step] = []
        self._offsets: dict[int, Span] = {}
        self._scratch = torch.empty(0, device=axis.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Runs the collective. x: contiguous."""
        primitive, n = self.collective.primitive, self.axis.size
        if n == 1:
            return x
        if primitive == "barrier":
            self._run(torch.zeros(1, dtype=torch.uint8, device=self.axis.device))
            return x
        if primitive in ("all_gather", "gather"):
            out = x.new_empty(n * x.shape[0], *x.shape[1:])
            out.view(n, -1)[self.axis.index] = x.view(-1)
            self._run(out.view(-1))
            return out
        if primitive in ("reduce_scatter", "scatter"):
            assert x.shape[0] % n == 0, f"{x.shape[0]} rows over {n} ranks"
            work = x.reshape(-1).clone()
            self._run(work)
            return work.view(n, -1)[self.axis.index].view(x.shape[0] // n, *x.shape[1:])
        if primitive == "all_to_all":
            return self._all_to_all(x)
        self._run(x.view(-1))
        return x

    def _all_to_all(self, x: Tensor) -> Tensor:
        """Works in one tensor: what this rank has for each (n parts), what it gets from each, and what passes by."""
        n, index = self.axis.size, self.axis.index
        assert x.shape[0] % n == 0, f"{x.shape[0]} rows over {n} ranks"
        part = x.numel() // n
        self._plan(x.numel(), x.dtype)
        work = x.new_empty(max(stop for _, stop in self._offsets.values()))
        work[: x.numel()] = x.view(-1)
        self._run(work, x.numel())
        out = work[x.numel() : 2 * x.numel()]
        out[index * part : (index + 1) * part] = x.view(-1)[index * part : (index + 1) * part]
        return out.view(x.shape)

    def _run(self, work: Tensor, size: int | None = None) -> None:
        """Goes through the rounds in place. size: elements of the message, if not those of `work`."""
        self._plan(work.numel() if size is None else size, work.dtype)
        scratch = self._scratch
        for sends, receives in self._steps:
            for message in sends:
                if message.packed:
                    parts = [work[a:b] for a, b in message.spans]
                    torch.cat(parts, out=scratch[slice(*message.packed)])
            leaving, arriving = (
                [
                    (work[slice(*m.spans[0])] if m.packed is None else scratch[slice(*m.packed)], m.peer)
                    for m in side
                ]
                for side in (sends, receives)
            )
            self.axis.start_moves(leaving, arriving)()
            for message in receives:
                if message.packed:
                    _unpack(message, scratch, work)

    def _plan(self, size: int, dtype: torch.dtype) -> None:
        """Prepares the rounds for messages of `size` elements."""
        if self._key == (size, dtype):
            return
        self._offsets = self._places(size)
        self._steps, most = [], 0
        for group in self.collective.rows[self.axis.index]:
            used = 0
            step: Step = ([], [])
            for receives, moves in enumerate((group.sends, group.receives)):
                parts: dict[tuple[int, bool], list[Move]] = {}
                for move in moves:
                    parts.setdefault((move.source if receives else move.target, move.reduce), []).append(move)
                for (peer, reduce), own in parts.items():
                    message = self._message(peer, reduce, own, used, bool(receives))
                    if message is not None:
                        step[receives].append(message)
                        used = message.packed[1] if message.packed else used
            if any(step):
                self._steps.append(step)
            most = max(most, used)
        self._scratch = torch.empty(most, dtype=dtype, device=self.axis.device)
        self._key = size, dtype

    def _message(
        self, peer: int, reduce: bool, moves: Sequence[Move], used: int, receives: bool
    ) -> _Message | None:
        """The message of some moves; None if it is empty. used: elements of scratch that others have taken."""
        spans: list[Span] = []
        for chunk in (chunk for move in moves for chunk in move.chunks):
            start, stop = self._offsets[chunk]
            if spans and spans[-1][1] == start:
                spans[-1] = spans[-1][0], stop
            elif start < stop:
                spans.append((start, stop))
        length = sum(b - a for a, b in spans)
        if not length:
            return None
        direct = len(spans) == 1 and not (receives and reduce)
        return _Message(peer, tuple(spans), reduce, None if direct else (used, used + length))

    def _places(self, size: int) -> dict[int, Span]:
        """Where each chunk is in the work tensor."""
        x, n, index = self.collective, self.axis.size, self.axis.index
        if x.primitive == "barrier":
            return dict.fromkeys(range(x.chunks), (0, 1))
        if x.primitive == "all_to_all":
            part, slots = size // n, 2 * n
            places = {}
            passing = {c for g in x.rows[index] for m in (*g.sends, *g.receives) for c in m.chunks}
            for chunk in sorted(passing | {*x.holds(index), *x.wants(index)}):
                source, target = divmod(chunk, n)
                slot = target if source == index else n + source if target == index else slots
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


def _unpack(message: _Message, scratch: Tensor, work: Tensor) -> None:
    """Adds or copies what has arrived."""
    assert message.packed is not None
    at = message.packed[0]
    for start, stop in message.spans:
        arrived = scratch[at : at + stop - start]
        if message.reduce:
            work[start:stop].add_(arrived)
        else:
            work[start:stop].copy_(arrived)
        at += stop - start
