"""Runs `schedules/compression/sparse.py`: top-k and random-k sums.

Legend: n ranks; E elements of the bucket; K that are sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fivefold.comm.axis import Axis
from fivefold.comm.compress import CompressedSum, Messages, uniform
from fivefold.schedules.compression.sparse import Sparse, TopK


class Sum(CompressedSum):
    def __init__(self, sparse: Sparse, shapes: Sequence[tuple[int, ...]], axis: Axis, number: int):
        super().__init__(shapes, axis, number)
        self.top, self.stretches = isinstance(sparse, TopK), sparse.stretches(shapes)
        self.counts = sparse.counts(shapes)
        self.residual = torch.zeros(sum(self.sizes), device=axis.device)
        self.residuals = list(self.residual.split(self.sizes))

    def _sum(self, gradients: Tensor) -> Messages:
        self._add(gradients.split(self.sizes))
        if not self.top:
            where = self._drawn()
            values = self.residual[where]
            # whatever is not finite must arrive, though it may not be drawn
            values[:1].add_(torch.linalg.vector_norm(self.residual, torch.inf), alpha=0)
            started = self.axis.start_all_reduce(values)
            self.residual.index_fill_(0, where, 0)
            total = yield started
            gradients.zero_()
            gradients.index_copy_(0, where, total)
            self._keep_if(total.isfinite().all())
            return
        largest = [
            stretch.abs().topk(count, sorted=False).indices  # NaN counts as the largest
            for stretch, count in zip(self.residual.split(self.stretches), self.counts, strict=True)
        ]
        lengths, counts = (
            torch.tensor(each, device=gradients.device) for each in (self.stretches, self.counts)
        )
        # for each element that is sent (K) the first one of its stretch
        firsts = (lengths.cumsum(0) - lengths).repeat_interleave(counts, output_size=sum(self.counts))
        local = torch.cat(largest)
        where = local + firsts
        values = self.residual[where].bfloat16()
        message = torch.cat([values.view(torch.int16), local.to(torch.int16)])  # (2 K)
        started = self.axis.start_all_gather(message.view(torch.uint8))
        self.residual.index_add_(0, where, values.float(), alpha=-1)
        gathered = (yield started).view(torch.int16).view(self.axis.size, 2, -1)  # (4 n K) -> (n, 2, K)
        gradients.zero_()
        for values, local in gathered:  # by rank: everyone adds in the same order
            indices = firsts + (local.long() & 0xFFFF)
            gradients.index_add_(0, indices, values.view(torch.bfloat16).float())
        self._keep_if(gathered[:, 0].view(torch.bfloat16).isfinite().all())

    def _drawn(self) -> Tensor:
        """The elements (K) of this step, the same on all ranks: one out of each of `count` equal parts of a parameter.
        So none is drawn twice, and each is drawn about equally often."""
        device, found, start = self.residual.device, [], 0
        random = uniform(sum(self.counts), self.steps, self.number, device).split(self.counts)
        for size, count, drawn in zip(self.stretches, self.counts, random, strict=True):
            ends = torch.arange(count + 1, device=device) * size // count
            found.append(start + ends[:-1] + (drawn * (ends[1:] - ends[:-1])).long())
            start += size
        return torch.cat(found)
