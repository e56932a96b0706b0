"""Runs `schedules/compression/sparse.py`: top-k and random-k sums.

Legend: n ranks; E elements of the bucket; K that are sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fivefold.comm.axis import Axis
from fivefold.comm.compress.base import CompressedSum, Messages, uniform
from fivefold.schedules.compression.sparse import Sparse, TopK


class Sum(CompressedSum):
    def __init__(self, sparse: Sparse, shapes: Sequence[tuple[int, ...]], axis: Axis, number: int):
        super().__init__(shapes, axis, number)
        self.top, self.counts = isinstance(sparse, TopK), sparse.counts(shapes)
        self.residual = torch.zeros(sum(self.sizes), device=axis.device)
        self.residuals = list(self.residual.split(self.sizes))

    def sum(self, gradients: Tensor) -> Messages:
        self._add(gradients.split(self.sizes))
        if self.top:
            yield from self._sum_largest(gradients)
        else:
            yield from self._sum_random(gradients)
        self.steps += 1

    def _sum_largest(self, gradients: Tensor) -> Messages:
        found, start = [], 0
        for residual, count in zip(self.residuals, self.counts, strict=True):
            # NaN counts as the largest
            found.append(residual.abs().topk(count, sorted=False).indices + start)
            start += residual.numel()
        where = torch.cat(found)
        message = torch.cat([self.residual[where].view(torch.int32), where.int()])  # (2 K)
        started = self.axis.start_all_gather(message)
        self.residual.index_fill_(0, where, 0)
        gathered = (yield started).view(self.axis.size, 2, -1)  # (n 2 K) -> (n, 2, K)
        gradients.zero_()
        for values, indices in gathered:  # by rank: everyone adds in the same order
            gradients.index_add_(0, indices, values.view(torch.float32))
        self._keep_if(gathered[:, 0].view(torch.float32).isfinite().all())

    def _sum_random(self, gradients: Tensor) -> Messages:
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

    def _drawn(self) -> Tensor:
        """The elements (K) of this step, the same on all ranks: one out of each of `count` equal stretches of a
        parameter. So none is drawn twice, and each is drawn about equally often."""
        device, found, start = self.residual.device, [], 0
        random = uniform(sum(self.counts), self.steps, self.number, device).split(self.counts)
        for size, count, drawn in zip(self.sizes, self.counts, random, strict=True):
            ends = torch.arange(count + 1, device=device) * size // count
            found.append(start + ends[:-1] + (drawn * (ends[1:] - ends[:-1])).long())
            start += size
        return torch.cat(found)
