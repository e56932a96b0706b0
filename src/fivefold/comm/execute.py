"""Runs a collective of `schedules/collectives` on the ranks of an axis, round by round.

    ring = Executor(axis, build("all_reduce", "ring", axis.size))
    ring(gradients)  # the sum of every rank's, in place

Sums are added in the order of the schedule, so they have the same bits every time and on every rank (`prove`).

Legend: n ranks; d0 first dim of a tensor; elements count from the start of the flat tensor that a rank works in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.comm.axis import Axis
from fivefold.schedules.collectives import Collective, prove
from fivefold.schedules.collectives.messages import Message, messages_of


class Scratch:
    """Memory that executors use one after the other. It grows to what the largest needs."""

    def __init__(self, device: torch.device):
        self.device, self._by_dtype = device, dict[torch.dtype, Tensor]()

    def of(self, size: int, dtype: torch.dtype) -> Tensor:
        """At least so many elements."""
        found = self._by_dtype.get(dtype)
        if found is None or len(found) < size:
            found = self._by_dtype[dtype] = torch.empty(size, dtype=dtype, device=self.device)
        return found

    def kept(self) -> list[Tensor]:
        return list(self._by_dtype.values())


class Executor:
    """Runs one collective on one axis. scratch: shared with other executors; None: its own.

    Which tensors a rank gives and gets:

    - all-reduce, broadcast, reduce: x, in place (after a reduce, only the root's is the sum; the others' are partial);
    - all-gather, gather: gives (d0, ...), gets (n d0, ...), by rank; after a gather, only the root's is complete;
    - reduce-scatter, scatter: gives (n d0, ...), gets (d0, ...); in a scatter, only the root's matters;
    - all-to-all: gives and gets (n d0, ...), by rank;
    - send: as broadcast, but only the rank after the root gets it;
    - barrier: any tensor, which stays as it is.
    """

    def __init__(self, axis: Axis, collective: Collective, scratch: Scratch | None = None):
        assert axis.size == collective.ranks, f"{collective.ranks} ranks on axis {axis.name} of {axis.size}"
        prove(collective)
        self.axis, self.collective, self.scratch = axis, collective, scratch or Scratch(axis.device)

    def reserve(self, size: int, dtype: torch.dtype) -> None:
        """Prepares for messages of `size` elements."""
        self.scratch.of(messages_of(self.collective, self.axis.index, size).scratch, dtype)

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
        places = messages_of(self.collective, index, x.numel()).places
        work = x.new_empty(max(stop for _, stop in places.values()))
        work[: x.numel()] = x.view(-1)
        self._run(work, x.numel())
        out = work[x.numel() : 2 * x.numel()]
        out[index * part : (index + 1) * part] = x.view(-1)[index * part : (index + 1) * part]
        return out.view(x.shape)

    def _run(self, work: Tensor, size: int | None = None) -> None:
        """Goes through the rounds in place. size: elements of the message, if not those of `work`."""
        whole = work.numel() if size is None else size
        steps, _, most = messages_of(self.collective, self.axis.index, whole)
        scratch = self.scratch.of(most, work.dtype)
        for sends, receives in steps:
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


def _unpack(message: Message, scratch: Tensor, work: Tensor) -> None:
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
