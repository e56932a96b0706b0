"""Matmuls of MXFP8: both factors in E4M3, in blocks of 32 numbers along the sum with a power of two each.

The scale of a block is the smallest power of two that brings its largest number into E4M3's range, so no number
saturates. arXiv 2506.08027 trains so. The OCP specification's own conversion takes half of that where the largest
number, as a fraction of its binade, is above 448/512, and saturates it: blocks that a layout cuts differently would
then round to other numbers. A block with a number that is not finite is NaN. Numbers below about 2^-120 are zero.

NVIDIA's Blackwell multiplies it by PyTorch's `scaled_mm`; other devices, and experts on all, emulate it. Never run on
such a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.kernels.fp8 import Fp8, capability, encode
from fivefold.kernels.rounded import Encoded, Factor
from fivefold.precision.formats import Format
from fivefold.precision.mxfp8 import FORMAT


@dataclass(frozen=True)
class Mxfp8(Fp8):
    """Each of the three matmuls rounds its factors along its own sum, so each factor is rounded in two ways."""

    def tile(self, shape: torch.Size, weight: bool = False) -> tuple[int, int]:
        return 1, FORMAT.size

    def multiplies(self, b: Tensor) -> bool:
        whole = b.dim() == 2 and not b.shape[0] % FORMAT.size and not b.shape[1] % FORMAT.size
        return whole and b.device.type == "cuda" and capability(b.device)[0] == 10

    def narrow(self, b: Tensor, weight: bool = False, encoded: Encoded | None = None) -> Factor:
        return self.encoded(b, FORMAT.element)

    def encoded(self, a: Tensor, form: Format) -> Factor:
        numbers, scales = encode(a, *self.tile(a.shape), form)
        return Factor(numbers, swizzled(scales.to(torch.float8_e8m0fnu)))


def swizzled(scales: Tensor) -> Tensor:
    """The scales (r, c) of blocks as Blackwell's matrix units read them, flat: in tiles of 128 rows and 4 blocks,
    filled up with zeros; in a tile the row modulo 32 comes first, then the row's quarter, then the block (NVIDIA,
    cuBLAS 12.9 documentation, "1D Block Scaling Factors Layout")."""
    r, c = scales.shape
    padded = F.pad(scales.view(torch.uint8), (0, -c % 4, 0, -r % 128))
    # (tiles, 4 quarters, 32 rows, tiles, 4 blocks)
    tiles = padded.unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32))
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(torch.float8_e8m0fnu)


def matmuls(options: Any) -> Mxfp8:
    """options: [precision] of the recipe, which says nothing more."""
    return Mxfp8(FORMAT.element, FORMAT.element)
