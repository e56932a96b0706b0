"""Matmuls of MXFP8, emulated: both factors in E4M3, in blocks of 32 numbers along the sum with a power of two each.

The scale of a block is the smallest power of two that brings its largest number into E4M3's range, so no number
saturates. arXiv 2506.08027 trains so. The OCP specification's own conversion takes half of that where the largest
number, as a fraction of its binade, is above 448/512, and saturates it: blocks that a layout cuts differently would
then round to other numbers. A block with a number that is not finite is NaN. Numbers below about 2^-120 are zero.
"""

from __future__ import annotations

from typing import Any

import torch

from fivefold.kernels.rounded import RoundedMatmuls
from fivefold.precision.mxfp8 import FORMAT


class Mxfp8(RoundedMatmuls):
    """Each of the three matmuls rounds its factors along its own sum, so each factor is rounded in two ways."""

    def tile(self, shape: torch.Size, weight: bool = False) -> tuple[int, int]:
        return 1, FORMAT.size


def matmuls(options: Any) -> Mxfp8:
    """options: [precision] of the recipe, which says nothing more."""
    return Mxfp8(FORMAT.element, FORMAT.element)
