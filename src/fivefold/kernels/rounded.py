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
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import accumulate
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.kernels import native
from fivefold.kernels.elementwise import to_device
from fivefold.kernels.private import storage_of
from fivefold.precision import Mode
from fivefold.precision.formats import FORMATS, Format
from fivefold.schedules.compression import LARGEST
from fivefold.sharding.parts import is_matrix

E4M3 = FORMATS["fp8 e4m3"]
LONGEST = 1024  # BLOCK in native.c
Encoded = tuple[Tensor, Tensor]
"""Numbers of 8 bits, and the factors that undo the scales of their tiles."""


@dataclass(frozen=True)
class Factor:
    """A rounded factor of a matmul (rows, summed dim), or one of each expert. scale: what undoes the scales of numbers
    of 8 bits, as the device's matmul takes it; None: the numbers are in the working dtype. dtype: of an activation or
    gradient (..., D) before it was rounded for both of its products (`RoundedMatmuls.both`)."""

    numbers: Tensor
    scale: Tensor | None = None
    dtype: torch.dtype = torch.bfloat16

    def flatten(self, first: int, last: int) -> Factor:
        return replace(self, numbers=self.numbers.flatten(first, last))

    def t(self) -> Factor:
        return replace(self, numbers=self.numbers.t())

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def in_dtype(self, dtype: torch.dtype) -> Tensor:
        """The numbers in the working dtype. 8 bits have a scale for the whole tensor here, a power of two."""
        return self.numbers if self.scale is None else self.numbers.to(dtype).mul_(self.scale)


Rows = Tensor | Factor
"""An activation or a gradient (..., D), perhaps rounded; or a factor."""


@dataclass(frozen=True)
class Kept:
    """A weight that is rounded once for all matmuls until it changes. output: its factor (F, D). gradient: that of the
    input's gradient (D, F), perhaps a view of the same memory. Those of experts (E, F, D) and (E, D, F)."""

    output: Factor
    gradient: Factor

    def tensors(self) -> list[Tensor]:
        """What has memory of its own."""
        found = [t for f in (self.output, self.gradient) for t in (f.numbers, f.scale) if t is not None]
        return list({storage_of(t): t for t in reversed(found)}.values())


@dataclass(frozen=True)
class RoundedMatmuls(ABC):
    """How a layer rounds and multiplies. gradients: the format of the output's gradient. inputs: that of the others.
    kept: the layer's weights, rounded, if a replica keeps them (`refresh`); else each matmul rounds its own."""

    gradients: Format = E4M3
    inputs: Format = E4M3
    replaces: ClassVar[bool] = False
    """True if a kept weight's numbers take the place of the layer's parameter."""
    dispatch: bool = field(default=False, kw_only=True)
    """True if rows are rounded on their way to experts, in forward to `inputs`, in backward to `gradients`."""
    kept: tuple[Kept, ...] = field(default=(), compare=False, repr=False)

    @abstractmethod
    def tile(self, shape: torch.Size, weight: bool = False) -> tuple[int, int]:
        """(rows, columns) that share a scale, of a factor whose last dim is summed."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x @ weight.T. x (..., D), weight (F, D) -> (..., F)."""
        flat = x.reshape(-1, x.shape[-1])
        y = self.product(flat, self.kept[0].output if self.kept else weight, self.inputs, weight=True)
        return y.view(*x.shape[:-1], weight.shape[0])

    def input_gradient(self, dy: Rows, weight: Tensor) -> Tensor:
        """dy @ weight. dy (..., F), weight (F, D) -> (..., D)."""
        kept = self.kept[0].gradient if self.kept else weight.t()
        dx = self.product(dy.flatten(0, -2), kept, self.gradients, weight=True)
        return dx.view(*dy.shape[:-1], weight.shape[1])

    def weight_gradient(self, dy: Rows, x: Rows) -> Tensor:
        """dy.T @ x, summed over all leading dims. dy (..., F), x (..., D) -> (F, D)."""
        dy, x = self.both(dy), self.both(x, self.inputs)
        return self.product(dy.flatten(0, -2).t(), x.flatten(0, -2).t(), self.gradients)

    def both(self, x: Rows, form: Format | None = None) -> Rows:
        """x (..., D), rounded to a format (None: that of gradients) if one rounding serves both of its products, along
        D and along the rows. Else x itself, and each product rounds it."""
        if isinstance(x, Factor):
            return x
        flat = x.reshape(-1, x.shape[-1])  # as in forward: a compiler sees that it is the same
        if self.tile(flat.shape) != self.tile(flat.mT.shape)[::-1]:
            return x
        one = self.first(flat, form or self.gradients)
        return replace(one, numbers=one.numbers.view(x.shape), dtype=x.dtype)

    def first(self, a: Tensor, form: Format) -> Factor:
        """A first factor (m, k), rounded."""
        return Factor(self.round(a, form))

    def product(self, a: Rows, b: Rows, form: Format, weight: bool = False) -> Tensor:
        """a @ b.T. a (m, k) in `form`, b (n, k), a weight or an input, both perhaps rounded already."""
        b = b if isinstance(b, Factor) else self.factor(b, weight)
        return F.linear(self.emulated(a, form), b.in_dtype(a.dtype))

    def emulated(self, a: Rows, form: Format) -> Tensor:
        """A factor (rows, summed dim), rounded, in the working dtype."""
        return a.in_dtype(a.dtype) if isinstance(a, Factor) else self.round(a, form)

    def factor(self, b: Tensor, weight: bool = False) -> Factor:
        """A second factor (n, k), or those of experts (E, n, k), rounded."""
        if b.dim() == 2:
            return Factor(self.round(b, weight=weight))
        # in the order of its memory, as each layer's: then sums have the same order, too
        stack = torch.empty_like(b)
        for one, there in zip(b, stack, strict=True):
            there.copy_(self.round(one, weight=True))
        return Factor(stack)

    def keep(self, weight: Tensor, inside: bool = False) -> Kept:
        """Rounds a weight (F, D), or those of experts (E, F, D). inside: in place, as far as one rounding goes."""
        columns, rows = self.tile(weight.mT.shape, True)
        tiles = self.tile(weight.shape, True), (rows, columns)
        first = weight if inside else torch.empty_like(weight)
        second = first if tiles[0] == tiles[1] else torch.empty_like(weight)
        each = (x.view(-1, *x.shape[-2:]) for x in (weight, first, second))
        for w, output, gradient in zip(*each, strict=True):
            if second is not first:
                round_tiles(w, *tiles[1], self.inputs, gradient)
            round_tiles(w, *tiles[0], self.inputs, output)
        return Kept(Factor(first), Factor(second.mT))

    def of(self, weight: int) -> Self:
        """For the weight with this number, of a layer that has several."""
        return replace(self, kept=self.kept[weight : weight + 1])

    def once(self, weight: Tensor, gradient: bool) -> Self:
        """For several products of a call by one weight (F, D), which is rounded here: for inputs' gradients, or not."""
        if self.kept:
            return self
        factor = self.factor(weight.t() if gradient else weight, True)
        return replace(self, kept=(Kept(factor, factor),))

    def grouped(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Rows (M, D) of experts times their weights (E, F, D) -> (M, F). ends: of each expert's rows, int32 (E)."""
        w = self.kept[0].output if self.kept else self.factor(weight)
        return self.grouped_product(rows, w, self.inputs, ends)

    def grouped_input_gradient(self, dy: Rows, weight: Tensor, ends: Tensor) -> Tensor:
        """dy (M, F), weights (E, F, D) -> (M, D)."""
        w = self.kept[0].gradient if self.kept else self.factor(weight.mT)
        return self.grouped_product(dy, w, self.gradients, ends)

    def grouped_product(self, a: Rows, b: Factor, form: Format, ends: Tensor) -> Tensor:
        """Rows a (M, k) in `form`, times b.T of their expert, b (E, n, k) -> (M, n)."""
        return F.grouped_mm(self.emulated(a, form), b.numbers.mT, offs=ends)

    def grouped_weight_gradient(self, dy: Rows, rows: Tensor, ends: Tensor) -> Tensor:
        """dy (M, F), rows (M, D) -> (E, F, D). A tile may have rows of two experts."""
        dy, x = self.both(dy).t(), self.both(rows, self.inputs).t()
        return F.grouped_mm(self.emulated(dy, self.gradients), self.emulated(x, self.inputs).t(), offs=ends)

    def round(self, x: Tensor, form: Format | None = None, weight: bool = False) -> Tensor:
        """A factor (rows, summed dim), rounded to a format (None: that of inputs), in its own dtype."""
        form = form or self.inputs
        rows, columns = self.tile(x.shape, weight)
        if x.is_contiguous() or not x.t().is_contiguous():
            return round_tiles(x.contiguous(), rows, columns, form)
        return round_tiles(x.t(), columns, rows, form).t()  # in the order of its memory


def rounded_matmuls(mode: Mode, options: Any) -> RoundedMatmuls | None:
    """How the blocks' layers multiply in a mode. options: [precision] of the recipe. None: they round nothing."""
    return import_module(f"fivefold.kernels.{mode.kernel}").matmuls(options) if mode.kernel else None


def matrices(layer: Any) -> list[str]:
    """The names of a layer's parameters that are factors of matmuls."""
    return [name for name, p in layer.named_parameters(recurse=False) if is_matrix(name, p.shape)]


def refresh(layer: Any, weights: Sequence[Tensor], inside: bool) -> None:
    """Lets a layer keep its matrices rounded, after they have changed. weights: in the order of `matrices`, in the
    working dtype. In the tensors that it has kept before, if any: compiled blocks know them. inside: see `keep`."""
    how: RoundedMatmuls | None = layer.rounded
    params = [getattr(layer, name) for name in matrices(layer)]
    if how is None:  # not any more
        for parameter, weight in zip(params, weights, strict=True):
            parameter.data = weight
        return
    fresh = tuple(how.keep(weight, inside) for weight in weights)
    if how.kept:
        for old, new in zip(how.kept, fresh, strict=True):
            for there, here in zip(old.tensors(), new.tensors(), strict=True):
                there.copy_(here)
        return
    layer.rounded = replace(how, kept=fresh)
    for parameter, kept in zip(params, fresh, strict=True) if how.replaces else ():
        parameter.data = kept.output.numbers
        parameter.grad_dtype = None  # autograd would cast gradients to 8 bits


def forget(layer: Any) -> None:
    """Lets each matmul of a layer round its weight again."""
    if layer.rounded is not None:
        layer.rounded = replace(layer.rounded, kept=())


def round_tiles(x: Tensor, rows: int, columns: int, form: Format, out: Tensor | None = None) -> Tensor:
    """x (r, c), contiguous, rounded to a format. Each tile of `rows` x `columns` has a scale. out: None, or where the
    result goes, perhaps x itself."""
    if x.device.type == "cpu" and native.usable(x) and x.numel():
        out = torch.empty_like(x) if out is None else out
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
    found = back.flatten(2, 3).flatten(0, 1)[:r, :c]
    return found.to(x.dtype) if out is None else out.copy_(found)


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


def encode_tiles(x: Tensor, rows: int, columns: int, form: Format) -> Encoded:
    """`fp8.encode` by PyTorch's operations."""
    tiles = tiles_of(x, rows, columns)
    largest = torch.maximum(tiles.amax((1, 3), keepdim=True), -tiles.amin((1, 3), keepdim=True))
    scale = power_of_two(largest.float(), form)
    # A power of two rounds nothing.
    numbers = (tiles * scale.to(x.dtype)).to(getattr(torch, form.torch)).reshape(x.shape)
    return numbers.contiguous(), 1 / scale[:, 0, :, 0]


class Quantizer:
    """Encodes rows of several parameters. Each parameter begins a new block, so no two share a scale.

    sizes: elements of each parameter in a row. Missing elements of a last block are zeros, which travel, too. levels:
    see `schedules.compression.Blocks`.
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
