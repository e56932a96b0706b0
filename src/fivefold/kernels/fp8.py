"""Matmuls of numbers of 8 bits (arXiv 2209.05433): inputs and weights in E4M3, gradients in E5M2 or E4M3.

Tiles (rounded.py) are whole tensors ("tensor"), vectors along the sum ("row"), or, as in DeepSeek-V3 (arXiv 2412.19437,
section 3.3), 128 numbers along the sum for activations and gradients, and 128 x 128 for weights ("block").

GPUs with fp8 multiply by PyTorch's `scaled_mm`, blocks on Hopper only.

`nanotron` keeps weights in fp8. A replica rounds them once per step, beside the masters. Where weights are gathered
(ZeRO) they arrive in bf16, and each matmul rounds them to the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fivefold.kernels.private import scaled_mm
from fivefold.kernels.rounded import E4M3, RoundedMatmuls, power_of_two, tiles_of
from fivefold.precision import PRECISIONS
from fivefold.precision.formats import Format
from fivefold.precision.fp8 import BLOCK, GRADIENTS


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

    def product(self, a: Tensor, b: Tensor, form: Format, weight: bool = False) -> Tensor:
        """By the device's matmul of fp8, if it has one for factors of these shapes."""
        has = a.device.type == "cuda" and a.shape[1] % 16 == 0 and b.shape[0] % 16 == 0
        if has and self.scaling == "block":  # cuBLAS has these on Hopper only
            has = a.shape[1] % BLOCK == 0 and b.shape[0] % BLOCK == 0 and _capability(a.device)[0] == 9
        if has and _capability(a.device) >= (8, 9):
            return self.multiply(a, b, form, weight)
        return super().product(a, b, form, weight)

    def multiply(self, a: Tensor, b: Tensor, form: Format, weight: bool = False) -> Tensor:
        """`product` by the device's matmul of fp8, summed in fp32 rather than with the fewer bits of fast sums."""
        a8, a_scale = encode(a, *self.tile(a.shape), form)
        b8, b_scale = encode(b, *self.tile(b.shape, weight), self.inputs)
        if self.scaling == "tensor":
            a_scale, b_scale = a_scale.view(()), b_scale.view(())
        elif self.scaling == "row":
            b_scale = b_scale.t()
        else:  # one for each row and 128 columns, column by column
            b_scale = b_scale.repeat_interleave(len(b) // len(b_scale), 0).t().contiguous()
            a_scale = a_scale.t().contiguous().t()
        return scaled_mm(a8, b8.t(), a_scale, b_scale, a.dtype)


@dataclass(frozen=True)
class KeptFp8(Fp8):
    """scale: a power of two, the factor of the weight's kept numbers; None: it is not kept. Gradients of weights are
    rounded, too: sums over microbatches and ranks add numbers of 8 bits."""

    scale: Tensor | None = field(default=None, compare=False)

    def product(self, a: Tensor, b: Tensor, form: Format, weight: bool = False) -> Tensor:
        if weight and self.scale is not None:
            b = b.to(a.dtype).mul_(self.scale)  # rounding it again changes nothing
        return super().product(a, b, form, weight)

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return self.round(super().weight_gradient(dy, x))


def keep(layer: Any, weight: Tensor) -> None:
    """Lets a layer keep its weight (F, D) in 8 bits, or as it is if the layer rounds nothing any more."""
    if (how := layer.rounded) is None:
        layer.weight.data = weight
        return
    numbers, scale = encode(weight, weight.shape[0], weight.shape[1], E4M3)
    if how.scale is None:
        layer.weight.data, layer.weight.grad_dtype = numbers, None  # autograd would cast gradients to 8 bits
        layer.rounded = replace(how, scale=scale.view(()))
    else:  # in place: compiled blocks know both tensors
        layer.weight.data.copy_(numbers)
        how.scale.copy_(scale.view(()))


def matmuls(options: Any) -> Fp8:
    """options: [precision] of the recipe."""
    if PRECISIONS[options.mode].weight:
        return KeptFp8(GRADIENTS[options.fp8_backward], scaling="tensor")
    return Fp8(GRADIENTS[options.fp8_backward], scaling=options.fp8_scaling)


def encode(x: Tensor, rows: int, columns: int, form: Format) -> tuple[Tensor, Tensor]:
    """x (r, c) as numbers of 8 bits, contiguous, and the factors (fp32) that undo the scales of its tiles: (r / rows, c
    / columns). The tiles are whole."""
    tiles = tiles_of(x, rows, columns)
    largest = torch.maximum(tiles.amax((1, 3), keepdim=True), -tiles.amin((1, 3), keepdim=True))
    scale = power_of_two(largest.float(), form)
    # A power of two rounds nothing.
    numbers = (tiles * scale.to(x.dtype)).to(getattr(torch, form.torch)).reshape(x.shape)
    return numbers.contiguous(), 1 / scale[:, 0, :, 0]


def _capability(device: torch.device) -> tuple[int, int]:
    if torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)
