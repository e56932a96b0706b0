"""Matmuls of numbers of 8 bits (arXiv 2209.05433): inputs and weights in E4M3, gradients in E5M2 or E4M3.

Tiles (rounded.py) are whole tensors ("tensor"), vectors along the sum ("row"), or, as in DeepSeek-V3 (arXiv 2412.19437,
section 3.3), 128 numbers along the sum for activations and gradients, and 128 x 128 for weights ("block").

GPUs with fp8 multiply by PyTorch's `scaled_mm`, blocks on Hopper only.

A replica that has whole weights rounds them once per step (`rounded.refresh`); those of `nanotron` take the place of
the weights, beside the masters. Where weights are gathered (ZeRO) they arrive in bf16, perhaps from 8 bits
(`NarrowRows`), and each matmul rounds them to the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.kernels import native
from fivefold.kernels.gpu import registry
from fivefold.kernels.private import scaled_grouped_mm, scaled_mm
from fivefold.kernels.rounded import (
    E4M3,
    Encoded,
    Factor,
    Kept,
    RoundedMatmuls,
    Rows,
    encode_tiles,
    power_of_two,
)
from fivefold.precision import PRECISIONS
from fivefold.precision.formats import Format
from fivefold.precision.fp8 import BLOCK, GRADIENTS, row_bytes


@dataclass(frozen=True)
class Fp8(RoundedMatmuls):
    """scaling: what shares a scale."""

    scaling: str = "block"

    def tile(self, shape: torch.Size, weight: bool = False) -> tuple[int, int]:
        if self.scaling == "tensor":
            return max(1, shape[-2]), max(1, shape[-1])
        if self.scaling == "row":
            return 1, max(1, shape[-1])
        return (BLOCK if weight else 1), BLOCK

    def multiplies(self, b: Tensor) -> bool:
        """True if the device has a matmul of fp8 for second factors like this one (n, k). For experts (E, n, k)
        PyTorch's takes one scale per row of E4M3. The gradients of their weights, sums of any length, are emulated."""
        if b.device.type != "cuda" or b.shape[-1] % 16 or b.shape[-2] % 16:
            return False
        hopper = capability(b.device)[0] == 9  # alone has blocks in cuBLAS, and PyTorch's grouped matmul
        if b.dim() == 3:
            return hopper and self.scaling == "row" and self.gradients == self.inputs
        if self.scaling == "block":
            return hopper and b.shape[-1] % BLOCK == 0 and b.shape[-2] % BLOCK == 0
        return capability(b.device) >= (8, 9)

    def factor(self, b: Tensor, weight: bool = False) -> Factor:
        return self.narrow(b, weight) if self.multiplies(b) else super().factor(b, weight)

    def keep(self, weight: Tensor, inside: bool = False) -> Kept:
        """In 8 bits twice where the device multiplies them: it reads both factors along their sum."""
        if not self.multiplies(weight):
            return super().keep(weight, inside)
        tile, first, second = self.tile(weight.shape, True), None, None
        if weight.dim() == 2 and (kernel := _kernel(weight, *tile)):
            found = kernel.encode(weight, *tile, self.inputs, both=True)
            first, second = found[:2], found[2:]
        return Kept(self.narrow(weight, True, first), self.narrow(weight.mT, True, second))

    def narrow(self, b: Tensor, weight: bool = False, encoded: Encoded | None = None) -> Factor:
        """A second factor in 8 bits, with its scales as PyTorch's matmuls take them: (E, n) of experts. encoded: it
        is, as by `encode`."""
        if b.dim() == 3:
            numbers, scales = zip(*(encode(one, 1, one.shape[1], self.inputs) for one in b), strict=True)
            return Factor(torch.stack(numbers), torch.stack(scales)[..., 0])
        b8, scale = encoded or encode(b, *self.tile(b.shape, weight), self.inputs)
        if self.scaling == "tensor":
            return Factor(b8, scale.view(()))
        if self.scaling == "row":
            return Factor(b8, scale.t())
        return Factor(b8, scale.repeat_interleave(len(b) // len(scale), 0).t().contiguous())

    def first(self, a: Tensor, form: Format) -> Factor:
        return self.encoded(a, form) if a.numel() and self.multiplies(a) else super().first(a, form)

    def encoded(self, a: Tensor, form: Format) -> Factor:
        """A first factor in 8 bits, with its scales as PyTorch's matmul takes them."""
        numbers, scale = encode(a, *self.tile(a.shape), form)
        if self.scaling == "tensor":
            scale = scale.view(())
        elif self.scaling == "block":  # one for each row and 128 columns, column by column
            scale = scale.t().contiguous().t()
        return Factor(numbers, scale)

    def grouped_product(self, a: Rows, b: Factor, form: Format, ends: Tensor) -> Tensor:
        if b.scale is None or isinstance(a, Factor):
            return super().grouped_product(a, b, form, ends)
        a8, scale = encode(a, 1, a.shape[1], form)
        return scaled_grouped_mm(a8, b.numbers.mT, scale[:, 0], b.scale, ends, a.dtype)

    def product(self, a: Rows, b: Rows, form: Format, weight: bool = False) -> Tensor:
        b = b if isinstance(b, Factor) else self.factor(b, weight)
        emulated = b.scale is None or (isinstance(a, Factor) and a.scale is None)
        narrow = not emulated and self.multiplies(b.numbers)
        return self.multiply(a, b, form) if narrow else super().product(a, b, form)

    def multiply(self, a: Rows, b: Factor, form: Format) -> Tensor:
        """`product` by the device's matmul of fp8, summed in fp32 rather than with the fewer bits of fast sums."""
        one = a if isinstance(a, Factor) else self.encoded(a, form)
        assert one.scale is not None
        assert b.scale is not None
        return scaled_mm(one.numbers.contiguous(), b.numbers.contiguous().t(), one.scale, b.scale, a.dtype)


class KeptFp8(Fp8):
    """The numbers that are kept take the place of the weight. Gradients of weights are rounded, too: sums over
    microbatches and ranks add numbers of 8 bits."""

    replaces = True

    def keep(self, weight: Tensor, inside: bool = False) -> Kept:
        numbers, scale = encode(weight, weight.shape[0], weight.shape[1], E4M3)
        factor = Factor(numbers, scale.view(()))
        return Kept(factor, Factor(numbers.t(), factor.scale))

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return self.round(super().weight_gradient(dy, x))


def matmuls(options: Any) -> Fp8:
    """options: [precision] of the recipe."""
    if PRECISIONS[options.mode].weight:
        return KeptFp8(GRADIENTS[options.fp8_backward], scaling="tensor")
    return Fp8(GRADIENTS[options.fp8_backward], scaling=options.fp8_scaling, dispatch=options.fp8_dispatch)


def encode(x: Tensor, rows: int, columns: int, form: Format) -> Encoded:
    """x (r, c) as numbers of 8 bits, contiguous, and the factors (fp32) that undo the scales of its tiles: (r / rows, c
    / columns). The tiles are whole."""
    kernel = _kernel(x, rows, columns)
    return (kernel.encode if kernel else encode_tiles)(x, rows, columns, form)


def _kernel(x: Tensor, rows: int, columns: int) -> Any:
    """The module of the kernel that encodes such tiles here; None: PyTorch's operations do."""
    if not native.in_triton(registry.ROUNDING, x):
        return None
    from fivefold.kernels.gpu import rounding  # which imports Triton

    return rounding if rounding.tile(rows, columns, x.shape) in rounding.KINDS else None


def encode_rows(x: Tensor, form: Format) -> Tensor:
    """Rows (M, D) as they travel, uint8 (M, `row_bytes(D)`): numbers of 8 bits, then the factors (fp32) of each 128."""
    D = x.shape[1]
    numbers, scale = encode(F.pad(x, (0, -D % BLOCK)), 1, BLOCK, form)
    scales = scale.reshape(-1).view(torch.uint8).view(len(x), row_bytes(D) - D)
    return torch.cat([numbers[:, :D].view(torch.uint8), scales], 1)


def decode_rows(sent: Tensor, D: int, form: Format, dtype: torch.dtype) -> Tensor:
    """What `encode_rows` made, as rows (M, D): exactly the rounded numbers."""
    numbers, scale = sent.split([D, sent.shape[1] - D], 1)
    rows = numbers.contiguous().view(getattr(torch, form.torch)).to(dtype)
    factors = scale.contiguous().view(torch.float32).to(dtype)
    return rows.mul_(factors.repeat_interleave(BLOCK, 1)[:, :D])


class NarrowRows:
    """A rank's rows of several parameters as a message that ranks gather: the factors (fp32) of tiles, what has no
    tiles as it is, numbers of 8 bits. Decoded, these are exactly the rounded numbers.

    pieces: the name of each parameter in order, its shape on a rank, the tile (rows, columns) or None. R: bytes of a
    message (`FsdpUnit.message`). width: of an element without a tile.
    """

    def __init__(
        self, pieces: Sequence[tuple[str, tuple[int, ...], tuple[int, int] | None]], R: int, width: int
    ):
        self.pieces, self.R = pieces, R
        self.shares = [math.prod(shape) for _, shape, _ in pieces]
        self.order = sorted(range(len(pieces)), key=lambda i: pieces[i][2] is not None)
        sized = list(zip(self.shares, (tile for *_, tile in pieces), strict=True))
        sizes = [4 * share // math.prod(tile) if tile else 0 for share, tile in sized]
        sizes += [share * (1 if tile else width) for share, tile in (sized[i] for i in self.order)]
        self.sizes = [*sizes, R - sum(sizes)]
        assert 0 <= self.sizes[-1] < 4, f"{sum(sizes)} bytes in a message of {R}"

    def _parts(self, sent: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The bytes of factors and of numbers of each parameter, in messages (p, R)."""
        parts = sent.split(self.sizes, 1)
        numbers = dict(zip(self.order, parts[len(self.order) :], strict=False))
        return [(parts[i], numbers[i]) for i in range(len(self.order))]

    def encode(self, x: Tensor, largest: Mapping[str, Tensor]) -> Tensor:
        """x (S) -> (R), uint8. largest: the largest number of each matrix (fp32), where a scale spans ranks."""
        sent = torch.zeros(1, self.R, dtype=torch.uint8, device=x.device)
        each = zip(self.pieces, self._parts(sent), x.split(self.shares), strict=True)
        for (name, shape, tile), (factors, numbers), part in each:
            if tile and largest:
                scale = power_of_two(largest[name], E4M3)
                part, found = (part * scale.to(x.dtype)).to(torch.float8_e4m3fn), 1 / scale
                factors.copy_(found.view(1, 1).view(torch.uint8))
            elif tile:
                part, found = encode(part.view(-1, shape[-1]), *tile, E4M3)
                factors.copy_(found.view(1, -1).view(torch.uint8))
            numbers.copy_(part.view(1, -1).view(torch.uint8))
        return sent[0]

    def decode(self, sent: Tensor, out: Tensor) -> None:
        """What every rank has sent (p, R) -> their rows (p, S), in the working dtype."""
        each = zip(self.pieces, self._parts(sent), out.split(self.shares, 1), strict=True)
        for (_, shape, tile), (factors, numbers), rows in each:
            rows.copy_(numbers.view(torch.float8_e4m3fn if tile else out.dtype))
            if tile:
                across = shape[-1] // tile[1]
                scale = factors.view(torch.float32).to(out.dtype).unflatten(1, (-1, 1, across, 1))
                rows.unflatten(1, (-1, tile[0], across, tile[1])).mul_(scale)


def capability(device: torch.device) -> tuple[int, int]:
    """Of an NVIDIA GPU; (0, 0) of others."""
    if torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)
