"""Compressed sums of gradients with error feedback (arXiv 1901.09847): what a message leaves out is added to the next
step's gradient. Each family of `schedules/compression` has a class here.

Error feedback: a rank adds its gradient to the residual, sends what the compressor makes of that, and keeps the rest as
the residual. So over the ranks the sum that everyone gets and the residuals add up to the gradients and the residuals
before. All ranks decode the same bytes in the same order, so they get the same bits.

A gradient that is not finite makes the whole bucket's sum not finite, so the step is skipped on every rank. Its
residuals then begin at zero again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from fivefold.comm.axis import Axis, Started
from fivefold.kernels.hashing import hash_
from fivefold.kernels.rounded import Quantizer
from fivefold.schedules.compression import LARGEST, Blocks, Compressor, LowRank, Sparse, TopK, sizes

Messages = Generator[Started, Tensor, None]
"""Yields each message after it has started, and is sent its result."""


class CompressedSum(ABC):
    """shapes: of the bucket's parameters. residual: this rank's, flat, fp32. residuals: its parts of each parameter;
    empty for those that are sent whole. steps: of the run, so far. after: the first steps, which send everything."""

    residual: Tensor
    residuals: list[Tensor]
    after: int = 0

    def __init__(self, shapes: Sequence[tuple[int, ...]], axis: Axis, number: int):
        self.shapes, self.sizes, self.axis, self.number = list(shapes), sizes(shapes), axis, number
        self.steps = 0
        self._before: list[Tensor] = []

    def sum(self, gradients: Tensor) -> Messages:
        """Replaces this rank's gradients (E) by the sum over all ranks."""
        if self.steps < self.after:
            yield self.axis.start_all_reduce(gradients)
        else:
            yield from self._sum(gradients)
        self.steps += 1

    @abstractmethod
    def _sum(self, gradients: Tensor) -> Messages:
        """The compressed sum."""

    def state(self) -> dict[str, Tensor]:
        """What stays from step to step, besides `steps`. Loading writes into these tensors."""
        return {"residual": self.residual}

    def errors(self) -> list[float]:
        """For each parameter the part of gradient and residual that the last step did not send, as a share of its
        norm; 0 before the first step, and for parameters that are sent whole."""
        if not self._before:
            return [0.0] * len(self.sizes)
        pairs = zip(_norms(self.residuals), self._before, strict=True)
        return torch.stack([after / before.clamp(min=1e-30) for after, before in pairs]).tolist()

    def _add(self, gradients: Sequence[Tensor]) -> None:
        """Adds gradients to the residuals. gradients: flat; empty where the residual is."""
        torch._foreach_add_(self.residuals, list(gradients))
        self._before = _norms(self.residuals)

    def _keep_if(self, finite: Tensor) -> None:
        """Sets the residual to zero unless the step's sum is finite. finite: a bool without dims."""
        self.residual.masked_fill_(~finite, 0)


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_norm(tensors))


def uniform(count: int, step: int, number: int, device: torch.device) -> Tensor:
    """`count` random numbers in [0, 1), fp64, the same on every rank and device: a hash of (step, number, index)."""
    key = (step * 0xD1B54A32D192ED03) ^ (number * 0x8CB92BA72F3D8DD7)
    bits = hash_(torch.arange(count, device=device), key, 0)
    return (bits >> 11).bitwise_and_((1 << 53) - 1).double() * 2.0**-53


class BlockSum(CompressedSum):
    """Sums with a scale per block. Legend: n ranks; C blocks of a chunk; B elements of a block; R bytes of an encoded
    chunk.

    The residual of a rank's own chunk is what the encoded sum left out (1-bit Adam's "server error"), that of the
    other chunks what its own encoding left out ("worker error")."""

    def __init__(self, blocks: Blocks, shapes: Sequence[tuple[int, ...]], axis: Axis, number: int):
        super().__init__(shapes, axis, number)
        self.blocks, self.C, n, B = blocks, blocks.chunk(shapes, axis.size), axis.size, blocks.block
        self.starts, padded = blocks.starts(shapes), n * self.C * B
        self.quantizer = (
            Quantizer(blocks.bits, B, [self.C * B], axis.device, blocks.levels)
            if blocks.bits in LARGEST
            else None
        )
        self.residual = torch.zeros(padded, device=axis.device)
        spans = zip(self.starts, self.sizes, strict=False)
        self.residuals = [self.residual[start : start + size] for start, size in spans]
        # elements of each block that exist, and those elements at the ends of parameters that do not
        self.counts = torch.full((n * self.C,), B, dtype=torch.float32, device=axis.device)
        gaps = [torch.arange(self.starts[-1], padded, device=axis.device)]
        for start, size, end in zip(self.starts, self.sizes, self.starts[1:], strict=False):
            self.counts[end // B - 1] -= end - start - size
            gaps.append(torch.arange(start + size, end, device=axis.device))
        self.missing = torch.cat(gaps)

    def _sum(self, gradients: Tensor) -> Messages:
        n, own, B = self.axis.size, self.axis.index, self.blocks.block
        others, row = [rank for rank in range(n) if rank != own], self.blocks.row(self.C)
        every = gradients.split(self.sizes)
        self._add(every)
        chunks, counts = self.residual.view(n, self.C, B), self.counts.view(n, self.C)
        sent = torch.empty(n, row, dtype=torch.uint8, device=self.residual.device)
        for rank in others:
            self._encode(chunks[rank], counts[rank], sent[rank])
        sent[own].zero_()  # travels nowhere
        started = self.axis.start_all_to_all(sent)
        for rank in others:
            chunks[rank].sub_(self._decode(sent[rank]))
        received = yield started
        for rank in others:
            chunks[own].add_(self._decode(received[rank]))
        del sent, started, received
        self._clear_missing()
        encoded = torch.empty(row, dtype=torch.uint8, device=self.residual.device)
        self._encode(chunks[own], counts[own], encoded)
        started = self.axis.start_all_gather(encoded)
        chunks[own].sub_(self._decode(encoded))
        gathered = (yield started).view(n, row)  # (n R) -> (n, R)
        for rank in range(n):
            chunk, first = self._decode(gathered[rank]).flatten(), rank * self.C * B
            for gradient, start in zip(every, self.starts, strict=False):
                a, b = max(start, first), min(start + len(gradient), first + len(chunk))
                if a < b:
                    gradient[a - start : b - start] = chunk[a - first : b - first]
            del chunk  # before the next one is made
        self._clear_missing()
        self._keep_if(self._scales(gathered).isfinite().all())

    def _clear_missing(self) -> None:
        """Signs of elements that do not exist decode to numbers."""
        self.residual.index_fill_(0, self.missing, 0)

    def _elements(self, encoded: Tensor) -> Tensor:
        """(.., R) -> the bytes of the elements."""
        return encoded[..., : self.C * self.blocks.block * self.blocks.bits // 8]

    def _scales(self, encoded: Tensor) -> Tensor:
        """(.., R) -> (.., C)."""
        return encoded[..., self.C * self.blocks.block * self.blocks.bits // 8 :].view(torch.float32)

    def _encode(self, x: Tensor, counts: Tensor, out: Tensor) -> None:
        """Writes a chunk (C, B) into R bytes. counts (C): elements of each block that exist."""
        if self.quantizer:
            self.quantizer.encode(x.view(1, -1), out[None])
            return
        # bit j of byte i is the sign of element j B / 8 + i: so eight passes over whole rows pack a block
        self._scales(out).copy_(x.abs().sum(-1)).div_(counts)
        bits = (x >= 0).view(torch.uint8).view(len(x), 8, -1)  # (C, B) -> (C, 8, B / 8)
        packed = self._elements(out).view(len(x), -1)
        packed.copy_(bits[:, 0])
        for j in range(1, 8):
            packed.bitwise_or_(bits[:, j] << j)

    def _decode(self, encoded: Tensor) -> Tensor:
        """(R) -> (C, B), fp32."""
        if self.quantizer:
            found = self.residual.new_empty(self.C, self.blocks.block)
            self.quantizer.decode(encoded[None], found.view(1, -1))
            return found
        packed, scales = self._elements(encoded).view(self.C, -1), self._scales(encoded)
        bits = torch.stack([packed >> j for j in range(8)], 1).bitwise_and_(1)  # (C, 8, B / 8)
        return bits.view(self.C, -1).float().mul_(2).sub_(1).mul_(scales[:, None])


class LowRankSum(CompressedSum):
    """PowerSGD. Legend: m, n rows and columns of a matrix; r rank of its approximation.

    The ranks compute the same small products of the same summed numbers. They get the same bits, if their processors
    are of one kind."""

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
        if not M:
            return
        # orthonormal columns (m, r) that span those of p. LAPACK gets no NaN; the gradient keeps it
        bases = [torch.linalg.qr(one.view(-1, r).nan_to_num()).Q for one in p]
        own = torch.cat([x.t() @ basis for x, basis in zip(M, bases, strict=True)])  # (sum of n, r)
        started = self.axis.start_all_reduce(own.clone())
        for x, basis, q in zip(M, bases, own.split(self.columns), strict=True):
            x.addmm_(basis, q.t(), alpha=-1)
        total = yield started
        for g, basis, q in zip(wide, bases, total.split(self.columns), strict=True):
            torch.mm(basis, q.t(), out=g.view(len(basis), len(q)))
        finite = total.isfinite().all() & rest.isfinite().all()
        self.q.copy_(torch.where(finite, total, self.q))
        self._keep_if(finite)


class SparseSum(CompressedSum):
    """Top-k and random-k sums. Legend: n ranks; E elements of the bucket; K that are sent."""

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


def compressed_sum(
    compressor: Compressor, shapes: Sequence[tuple[int, ...]], axis: Axis, number: int
) -> CompressedSum:
    """The compressed sum of a bucket's gradients over an axis. shapes: of its parameters. number: the bucket's."""
    families = {Blocks: BlockSum, LowRank: LowRankSum, Sparse: SparseSum}
    make: Any = next(run for family, run in families.items() if isinstance(compressor, family))
    return make(compressor, shapes, axis, number)
