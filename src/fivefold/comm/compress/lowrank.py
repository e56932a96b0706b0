"""Runs `schedules/compression/lowrank.py`: PowerSGD.

The ranks compute the same small products of the same summed numbers. They get the same bits, if their processors are of
one kind.

Legend: m, n rows and columns of a matrix; r rank of its approximation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fivefold.comm.axis import Axis
from fivefold.comm.compress import CompressedSum, Messages, uniform
from fivefold.schedules.compression.lowrank import LowRank


class Sum(CompressedSum):
    def __init__(self, lowrank: LowRank, shapes: Sequence[tuple[int, ...]], axis: Axis, number: int):
        super().__init__(shapes, axis, number)
        two = [lowrank.matrix(shape) for shape in shapes]
        self.kept = [m * n for m, n in filter(None, two)]
        self.rows, self.columns = [m for m, _ in filter(None, two)], [n for _, n in filter(None, two)]
        self.is_matrix, r = [one is not None for one in two], lowrank.rank
        self.residual = torch.zeros(sum(self.kept), device=axis.device)
        parts = iter(self.residual.split(self.kept))
        self.residuals = [next(parts) if matrix else self.residual[:0] for matrix in self.is_matrix]
        # any start will do whose columns differ
        start = uniform(r * sum(self.columns), 0, number, axis.device).sub_(0.5).float()
        self.q = start.view(-1, r)  # (sum of n, r)

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"q": self.q}

    def _sum(self, gradients: Tensor) -> Messages:
        every = gradients.split(self.sizes)
        plain = [g for g, matrix in zip(every, self.is_matrix, strict=True) if not matrix]
        wide = [g for g, matrix in zip(every, self.is_matrix, strict=True) if matrix]
        self._add([g if matrix else g[:0] for g, matrix in zip(every, self.is_matrix, strict=True)])
        M = [
            x.view(m, n)
            for x, m, n in zip(self.residual.split(self.kept), self.rows, self.columns, strict=True)
        ]
        r = self.q.shape[1]
        p = [(x @ q).flatten() for x, q in zip(M, self.q.split(self.columns), strict=True)]
        summed = yield self.axis.start_all_reduce(torch.cat([*p, *plain]))
        *p, rest = summed.split([*(r * m for m in self.rows), sum(g.numel() for g in plain)])
        if plain:
            torch._foreach_copy_(plain, list(rest.split([g.numel() for g in plain])))
        if M:
            # orthonormal columns that span those of p. LAPACK gets no NaN; the gradient keeps it
            bases = [torch.linalg.qr(one.view(-1, r).nan_to_num()).Q for one in p]
            yield from self._second(M, wide, bases, rest.isfinite().all())

    def _second(
        self, M: list[Tensor], gradients: list[Tensor], p: list[Tensor], rest_finite: Tensor
    ) -> Messages:
        """The second message, given orthonormal P (m, r) of each matrix: the sum of Q. rest_finite: of what is sent
        whole."""
        own = torch.cat([x.t() @ one for x, one in zip(M, p, strict=True)])  # (sum of n, r)
        started = self.axis.start_all_reduce(own.clone())
        for x, one, q in zip(M, p, own.split(self.columns), strict=True):
            x.addmm_(one, q.t(), alpha=-1)
        total = yield started
        for g, one, q in zip(gradients, p, total.split(self.columns), strict=True):
            torch.mm(one, q.t(), out=g.view(len(one), len(q)))
        finite = total.isfinite().all() & rest_finite
        self.q.copy_(torch.where(finite, total, self.q))
        self._keep_if(finite)
