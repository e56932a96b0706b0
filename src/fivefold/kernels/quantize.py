"""Quantised rows: whole numbers of 8 or 4 bits, with a scale (fp32) per block.

Legend: r rows; S elements of a row; C blocks of a row; B elements of a whole block; R bytes of an encoded row: C blocks
of B numbers, then C scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from fivefold.kernels import native
from fivefold.schedules.compression.blocks import LARGEST

LONGEST = 1024  # BLOCK in native.c


class Quantizer:
    """Encodes rows of several parameters. Each parameter begins a new block, so no two share a scale.

    sizes: elements of each parameter in a row. Missing elements of a last block are zeros, which travel, too.
    """

    def __init__(self, bits: int, block: int, sizes: Sequence[int], device: torch.device):
        assert block <= LONGEST, f"blocks of {block} elements: native.c takes {LONGEST}"
        self.bits, self.B, ends = bits, block, list(accumulate(sizes))
        firsts = [
            first for start, end in zip([0, *ends], ends, strict=False) for first in range(start, end, block)
        ]
        self.S, self.C = sum(sizes), len(firsts)
        self.whole = self.C * block == self.S
        self.starts = torch.tensor([*firsts, self.S], device=device)  # (C + 1)
        self.numbers = self.C * block * bits // 8  # bytes
        self.R = self.numbers + 4 * self.C

    def encode(self, x: Tensor, out: Tensor) -> None:
        """(r, S) -> (r, R), uint8. The last dims are contiguous. A number that is not finite makes its block NaN."""
        if x.device.type == "cpu" and native.usable(x):
            native.call(
                "quantize", x.dtype, x, x.stride(0), self.starts, out, out.stride(0), len(x), self.C, self.B, self.bits
            )  # fmt: skip
            return
        blocks = x.float() if self.whole else x.new_zeros(len(x), self.C * self.B, dtype=torch.float32)
        if not self.whole:
            blocks[:, self._places()] = x.float()
        encode_blocks(blocks.unflatten(1, (self.C, self.B)), self.bits, *self._parts(out))

    def encoded(self, x: Tensor) -> Tensor:
        """(r, S) -> (r, R)."""
        out = torch.empty(len(x), self.R, dtype=torch.uint8, device=x.device)
        self.encode(x, out)
        return out

    def decode(self, encoded: Tensor, out: Tensor, add: bool = False) -> None:
        """(r, R) -> (r, S), in the dtype of `out`, or added to it."""
        if out.device.type == "cpu" and native.usable(out):
            native.call(
                "dequantize", out.dtype, out, out.stride(0), self.starts, encoded, encoded.stride(0), len(out), self.C,
                self.B, self.bits, int(add),
            )  # fmt: skip
            return
        found = decode_blocks(self.bits, *self._parts(encoded)).flatten(1)  # (r, C, B) -> (r, C B)
        found = found if self.whole else found[:, self._places()]
        out.add_(found) if add else out.copy_(found)

    def _parts(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """(r, R) -> numbers (r, C, bytes of a block), scales (r, C)."""
        numbers = encoded[:, : self.numbers].unflatten(1, (self.C, self.B * self.bits // 8))
        return numbers, encoded[:, self.numbers :].view(torch.float32)

    def _places(self) -> Tensor:
        """Where each element (S) of a row stands among C B."""
        lengths = self.starts.diff()
        firsts = torch.arange(self.C, device=lengths.device) * self.B - self.starts[:-1]
        return torch.arange(self.S, device=lengths.device) + firsts.repeat_interleave(
            lengths, output_size=self.S
        )


def encode_blocks(x: Tensor, bits: int, numbers: Tensor, scales: Tensor) -> None:
    """x: (.., C, B), fp32 -> numbers: (.., C, B bits / 8), uint8, and scales: (.., C), fp32.

    The largest element becomes the largest whole number. Of 4 bits, element i of a block shares a byte with element
    i + B / 2, so that whole halves are packed at once.
    """
    scales.copy_(x.abs().amax(-1)).mul_(1 / LARGEST[bits])
    rounded = (x / scales.clamp(min=1e-38)[..., None]).round_().to(torch.int8)
    if bits == 8:
        numbers.view(torch.int8).copy_(rounded)
        return
    low, high = rounded.view(torch.uint8).chunk(2, -1)
    numbers.copy_(low & 15).bitwise_or_(high << 4)


def decode_blocks(bits: int, numbers: Tensor, scales: Tensor) -> Tensor:
    """Numbers (.., C, B bits / 8) and scales (.., C) -> (.., C, B), fp32."""
    signed = numbers.view(torch.int8)
    if bits == 4:
        signed = torch.cat([(numbers << 4).view(torch.int8) >> 4, signed >> 4], -1)
    return signed * scales[..., None]
