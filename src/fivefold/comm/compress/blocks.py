"""Runs `schedules/compression/blocks.py`: int8, int4 and 1-bit sums.

Legend: n ranks; C blocks of a chunk; B elements of a block; R bytes of an encoded chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fivefold.comm.axis import Axis
from fivefold.comm.compress import CompressedSum, Messages
from fivefold.kernels.quantize import Quantizer
from fivefold.schedules.compression.blocks import LARGEST, Blocks


class Sum(CompressedSum):
    """The residual of a rank's own chunk is what the encoded sum left out (1-bit Adam's "server error"), that of the
    other chunks what its own encoding left out ("worker error")."""

    def __init__(self, blocks: Blocks, shapes: Sequence[tuple[int, ...]], axis: Axis, number: int):
        super().__init__(shapes, axis, number)
        self.blocks, self.C, n, B = blocks, blocks.chunk(shapes, axis.size), axis.size, blocks.block
        self.starts, padded = blocks.starts(shapes), n * self.C * B
        self.quantizer = (
            Quantizer(blocks.bits, B, [self.C * B], axis.device) if blocks.bits in LARGEST else None
        )
        self.residual = torch.zeros(padded, device=axis.device)
        self.residuals = self._parts(self.residual)
        # elements of each block that exist, and those elements at the ends of parameters that do not
        self.counts = torch.full((n * self.C,), B, dtype=torch.float32, device=axis.device)
        gaps = [torch.arange(self.starts[-1], padded, device=axis.device)]
        for start, size, end in zip(self.starts, self.sizes, self.starts[1:], strict=False):
            self.counts[end // B - 1] -= end - start - size
            gaps.append(torch.arange(start + size, end, device=axis.device))
        self.missing = torch.cat(gaps)

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """The elements of each parameter."""
        return [flat[start : start + size] for start, size in zip(self.starts, self.sizes, strict=False)]

    def _sum(self, gradients: Tensor) -> Messages:
        n, own, B = self.axis.size, self.axis.index, self.blocks.block
        others, row = [rank for rank in range(n) if rank != own], self.blocks.row(self.C)
        self._add(gradients.split(self.sizes))
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
            self._place(self._decode(gathered[rank]).flatten(), rank * self.C * B, gradients)
        self._clear_missing()
        self._keep_if(self._scales(gathered).isfinite().all())

    def _place(self, chunk: Tensor, first: int, gradients: Tensor) -> None:
        """Copies the elements of a chunk, which begins at `first`, to those of the gradients (E)."""
        offset, last = 0, first + len(chunk)
        for start, size in zip(self.starts, self.sizes, strict=False):
            a, b = max(start, first), min(start + size, last)
            if a < b:
                gradients[offset + a - start : offset + b - start] = chunk[a - first : b - first]
            offset += size

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
