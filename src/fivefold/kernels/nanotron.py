"""Matmuls with weights that are kept in fp8 (precision/nanotron.py).

A replica rounds these weights once per step and keeps them beside the bf16 masters. Where weights are gathered instead
(ZeRO) they arrive in bf16, and each matmul rounds them to the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fivefold.kernels.fp8 import Fp8, encode
from fivefold.precision.formats import Format
from fivefold.precision.nanotron import OTHERS, OUTPUTS


@dataclass(frozen=True)
class Nanotron(Fp8):
    """scale: the power of two, a scalar, that makes a layer's kept numbers its weight; None: it keeps none."""

    scale: Tensor | None = field(default=None, compare=False)

    def product(self, a: Tensor, b: Tensor, form: Format, weight: bool = False) -> Tensor:
        if weight and self.scale is not None:
            b = b.to(a.dtype).mul_(self.scale)  # rounding it again changes nothing
        return super().product(a, b, form, weight)

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """Rounded: sums over microbatches and ranks add numbers of 8 bits."""
        return self.round(super().weight_gradient(dy, x))


def matmuls(options: Any) -> Nanotron:
    return Nanotron(OUTPUTS, OTHERS, scaling="tensor")


def keep(layer: Any, weight: Tensor) -> None:
    """Lets a layer keep its weight (F, D) in 8 bits, or as it is if the layer rounds nothing any more."""
    if layer.rounded is None:
        layer.weight.data = weight
        return
    numbers, scale = encode(weight, *weight.shape, OTHERS)
    layer.weight.data, layer.weight.grad_dtype = numbers, None  # autograd would cast gradients to 8 bits
    layer.rounded = replace(layer.rounded, scale=scale.view(()))
