"""The three matmuls of a linear layer on rounded factors, summed in higher precision.

Both factors are rounded first. A scale makes the largest number of a *tile* fill the format's range; what a tile is, is
the mode's choice (fp8.py, mxfp8.py). Scales are powers of two. So a scale changes no number but those that become
subnormal: 2^-14 of the tile's largest and smaller in E4M3, 2^-29 in E5M2. Layouts that cut a tile differently therefore
round to the same numbers, up to 2^-17 and 2^-31 of the tile's largest.

The rounded numbers are multiplied in bf16, which holds numbers of 8 bits exactly, and summed in fp32, at the speed of
bf16. A mode may know a faster way to the same results.

Below: rows that are sent as whole numbers of 8 or 4 bits, with a scale (fp32) per block.

Legend: N rows (tokens), D input features, F output features, E experts. Of rows that are sent: r rows; S elements of a
row; C blocks of a row; B elements of a whole block; R bytes of an encoded row: C blocks of B numbers, then C scales.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.kernels import native
from fivefold.kernels.elementwise import to_device
from fivefold.precision import Mode
from fivefold.precision.formats import FORMATS, Format
from fivefold.schedules.compression.blocks import LARGEST

E4M3 = FORMATS["fp8 e4m3"]
LONGEST = 1024  # BLOCK in native.c


@dataclass(frozen=True)
class RoundedMatmuls(ABC):
    """How a layer rounds and multiplies. gradients: the format of the output's gradient. inputs: that of the others."""

    gradients: Format = E4M3
    inputs: Format = E4M3

    @abstractmethod
    def tile(self, shape: torch.Size, weight: bool = False) -> tuple[int, int]:
        """(rows, columns) that share a scale, of a factor whose last dim is summed."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x @ weight.T. x (..., D), weight (F, D) -> (..., F)."""
        flat = x.reshape(-1, x.shape[-1])
        y = self.product(flat, weight, self.inputs, weight=True)
        return y.view(*x.shape[:-1], weight.shape[0])

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """dy @ weight. dy (..., F), weight (F, D) -> (..., D)."""
        flat = dy.reshape(-1, dy.shape[-1])
        dx = self.product(flat, weight.t(), self.gradients, weight=True)
        return dx.view(*dy.shape[:-1], weight.shape[1])

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """dy.T @ x, summed over all leading dims. dy (..., F), x (..., D) -> (F, D)."""
        return self.product(dy.flatten(0, -2).t(), x.flatten(0, -2).t(), self.gradients)

    def product(self, a: Tensor, b: Tensor, form: Format, weight: bool = False) -> Tensor:
        """a @ b.T. a (m, k) in `form`, b (n, k), a weight or an input."""
        return F.linear(self.round(a, form), self.round(b, weight=weight))

    def round(self, x: Tensor, form: Format | None = None, weight: bool = False) -> Tensor:
        """A factor (rows, summed dim), rounded to a format (None: that of inputs), in its own dtype."""
        form = form or self.inputs
        rows, columns = self.tile(x.shape, weight)
        if x.is_contiguous() or not x.t().is_contiguous():
            return round_tiles(x.contiguous(), rows, columns, form)
        return round_tiles(x.t(), columns, rows, form).t()  # in the order of its memory

    def round_experts(self, weights: Tensor) -> Tensor:
        """A stack of weights (E, rows, summed dim), each rounded by itself. Experts are always multiplied in bf16."""
        return torch.stack([self.round(weight, weight=True) for weight in weights])


def rounded_matmuls(mode: Mode, options: Any) -> RoundedMatmuls | None:
    """How the blocks' layers multiply in a mode. options: [precision] of the recipe. None: they round nothing."""
    return import_module(f"fivefold.kernels.{mode.kernel}").matmuls(options) if mode.kernel else None


def round_tiles(x: Tensor, rows: int, columns: int, form: Format) -> Tensor:
    """x (r, c), contiguous, rounded to a format. Each tile of `rows` x `columns` has a scale."""
    if x.device.type == "cpu" and native.usable(x) and x.numel():
        out = torch.empty_like(x)
        native.call(
            "round_tiles", x.dtype, x, out, *x.shape, rows, columns, form.fraction, form.highest, form.lowest,
            float(form.largest),
        )  # fmt: skip
        return out
    r, c = x.shape
    padded = F.pad(x.float(), (0, -c % columns, 0, -r % rows))
    tiles = tiles_of(padded, rows, columns)
    scale = power_of_two(tiles.abs().amax((1, 3), keepdim=True), form)
    back = (tiles * scale).to(getattr(torch, form.torch)).float() / scale
    return back.flatten(2, 3).flatten(0, 1)[:r, :c].to(x.dtype)


def tiles_of(x: Tensor, rows: int, columns: int) -> Tensor:
    """x (r, c) as whole tiles: (r / rows, rows, c / columns, columns)."""
    return x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def power_of_two(largest: Tensor, form: Format) -> Tensor:
    """The largest powers of two, times which numbers as large as `largest` (fp32) are in a format's range. 1 for zero,
    NaN for what is not finite."""
    fraction, exponent = torch.frexp(largest)
    power = form.highest - (exponent - 1) - (2 * fraction > form.largest / 2.0**form.highest).int()
    scale = torch.ldexp(torch.ones_like(largest), power.clamp(max=110))
    return torch.where(largest > 0, torch.where(largest.isinf(), torch.nan, scale), largest + 1)


class Quantizer:
    """Encodes rows of several parameters. Each parameter begins a new block, so no two share a scale.

    sizes: elements of each parameter in a row. Missing elements of a last block are zeros, which travel, too. levels:
    see `schedules.compression.blocks.Blocks`.
    """

    def __init__(
        self, bits: int, block: int, sizes: Sequence[int], device: torch.device, levels: Sequence[float] = ()
    ):
        assert block <= LONGEST, f"blocks of {block} elements: native.c takes {LONGEST}"
        self.bits, self.B, ends = bits, block, list(accumulate(sizes))
        firsts = [
            first for start, end in zip([0, *ends], ends, strict=False) for first in range(start, end, block)
        ]
        self.S, self.C = sum(sizes), len(firsts)
        self.whole = self.C * block == self.S
        self.starts = to_device(torch.tensor([*firsts, self.S]), device)  # (C + 1)
        self.numbers = self.C * block * bits // 8  # bytes
        self.R = self.numbers + 4 * self.C
        self.levels = to_device(torch.tensor(levels, dtype=torch.float32), device) if levels else None

    def encode(self, x: Tensor, out: Tensor) -> None:
        """(r, S) -> (r, R), uint8. The last dims are contiguous. A number that is not finite makes its block NaN."""
        if self.levels is None and x.device.type == "cpu" and native.usable(x):
            native.call(
                "quantize", x.dtype, x, x.stride(0), self.starts, out, out.stride(0), len(x), self.C, self.B, self.bits
            )  # fmt: skip
            return
        blocks = x.float() if self.whole else x.new_zeros(len(x), self.C * self.B, dtype=torch.float32)
        if not self.whole:
            blocks[:, self._places()] = x.float()
        blocks, (numbers, scales) = blocks.unflatten(1, (self.C, self.B)), self._parts(out)
        # The largest element becomes the largest whole number, or the last level.
        scales.copy_(blocks.abs().amax(-1)).mul_(1 if self.levels is not None else 1 / LARGEST[self.bits])
        shares = blocks / scales.clamp(min=1e-38)[..., None]
        if self.levels is None:
            codes = shares.round_().to(torch.int8).view(torch.uint8)
        else:
            middles = (self.levels[1:] + self.levels[:-1]) / 2
            codes = torch.bucketize(shares, middles, out_int32=True).to(torch.uint8)
        if self.bits == 8:
            numbers.copy_(codes)
            return
        # Element i of a block shares a byte with element i + B / 2, so that whole halves are packed at once.
        low, high = codes.chunk(2, -1)
        numbers.copy_(low & 15).bitwise_or_(high << 4)

    def encoded(self, x: Tensor) -> Tensor:
        """(r, S) -> (r, R)."""
        out = torch.empty(len(x), self.R, dtype=torch.uint8, device=x.device)
        self.encode(x, out)
        return out

    def decode(self, encoded: Tensor, out: Tensor, add: bool = False) -> None:
        """(r, R) -> (r, S), in the dtype of `out`, or added to it."""
        if self.levels is None and out.device.type == "cpu" and native.usable(out):
            native.call(
                "dequantize", out.dtype, out, out.stride(0), self.starts, encoded, encoded.stride(0), len(out), self.C,
                self.B, self.bits, int(add),
            )  # fmt: skip
            return
        numbers, scales = self._parts(encoded)
        if self.levels is not None:
            codes = torch.cat([numbers & 15, numbers >> 4], -1) if self.bits == 4 else numbers
            signed = self.levels.index_select(0, codes.flatten().int()).view(codes.shape)
        elif self.bits == 4:
            signed = torch.cat([(numbers << 4).view(torch.int8) >> 4, numbers.view(torch.int8) >> 4], -1)
        else:
            signed = numbers.view(torch.int8)
        decoded = (signed * scales[..., None]).flatten(1)  # (r, C, B) -> (r, C B)
        decoded = decoded if self.whole else decoded[:, self._places()]
        out.add_(decoded) if add else out.copy_(decoded)

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
