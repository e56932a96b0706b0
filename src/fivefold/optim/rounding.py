"""Rounds weights and states that are kept in lower precision than they are computed in.

An update runs over fp32 copies: of a few parameters at a time (`updater.Rounded`), or of a chunk of streamed states
(parallel/offload). Then weights and states are rounded back. `precision.rounding` says how:

- nearest: an update smaller than half a spacing of the weight (2^-9 of it in bf16) is lost.
- stochastic (arXiv 1502.02551): up or down at random, so that the mean is the number itself. The random bits depend on
  (seed, step, name, element index), so they are the same on every layout, and replicas stay equal.
- kahan (arXiv 2010.06192): what rounding cuts off a weight is a state of its own, which the next update adds again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from fivefold.kernels import native
from fivefold.kernels.hashing import hash_, indices, keys
from fivefold.kernels.rounded import E4M3, power_of_two
from fivefold.optim.card import OptimizerCard
from fivefold.sharding.parts import Part, boxes, local_shape, size_of, stretches


@dataclass
class Rounder:
    """Rounds what a rank keeps of some parameters, whole or in pieces: with the same bits.

    how: `precision.rounding`. dtype: of the rounded states. seed: of the run. card: with the states as they are kept.
    steps: how many steps have begun; it seeds stochastic rounding.
    """

    how: str
    dtype: torch.dtype
    seed: int
    card: OptimizerCard
    parts: Mapping[str, Part]
    steps: int = 0

    def round(self, exact: Tensor, key: str, name: str, dtype: torch.dtype, start: int = 0) -> Tensor:
        """exact: fp32, elements of this rank's part of parameter `name` from element `start` on, in their order. It may
        change. key: of the tensor that is rounded, a weight or a state."""
        if self.how != "stochastic" or dtype.itemsize == 1:
            return exact.to(dtype)
        part, exact = self.parts[name], exact.contiguous()
        key_a, key_b = keys(f"{self.seed}/{self.steps}/{key}")
        rest = exact.view(-1)
        for ranges in stretches(part.keeps, start, start + rest.numel()):
            piece, rest = rest[: size_of(ranges)].view(local_shape(ranges)), rest[size_of(ranges) :]
            for where, box in boxes(ranges):
                round_stochastic_(piece[where], part.shape, box, key_a, key_b)
        return exact.to(dtype)


def scale_(exact: Tensor, divides: bool) -> Tensor:
    """Scales a state (fp32) by a power of two, so that its largest number fills E4M3's range, and returns what undoes
    it. States in 8 bits are rounded to nearest behind it. divides: an update divides by its root, so none becomes 0."""
    largest = torch.stack(exact.aminmax()).abs().amax() if exact.numel() else exact.new_zeros(())
    scale = power_of_two(largest, E4M3)
    exact.mul_(scale)
    if divides:
        exact.clamp_(min=E4M3.smallest * (largest > 0))
    return 1 / scale


def round_stochastic_(
    x: Tensor, shape: tuple[int, ...], box: tuple[tuple[int, int], ...], key_a: int, key_b: int
) -> None:
    """Rounds fp32 numbers in place to bf16, up with a probability that is their distance from the lower one. x: the box
    of a tensor of this shape.

    A bf16 number is an fp32 number whose lower 16 bits are 0. Random bits are added to these and carry, or not.
    """
    if getattr(x, "fake", False):
        return
    if not shape:
        x, shape, box = x.view(1), (1,), ((0, 1),)
    if x.is_contiguous() and native.usable(x):
        # The box as ranges of flat indices: rows of `width` elements, `stride` apart. Trailing dims that are whole join
        # the row; each combination of the leading ones begins a group of rows.
        dim = len(shape) - 1
        while dim > 0 and box[dim] == (0, shape[dim]):
            dim -= 1
        inner = math.prod(shape[dim + 1 :])
        first, width, stride = box[dim][0] * inner, (box[dim][1] - box[dim][0]) * inner, shape[dim] * inner
        low, high = box[dim - 1] if dim else (0, 1)
        strides = [math.prod(shape[i + 1 :]) for i in range(dim - 1)]
        for group, place in enumerate(product(*(range(*span) for span in box[: max(0, dim - 1)]))):
            start = low * stride + first + sum(i * s for i, s in zip(place, strides, strict=True))
            part = x.view(-1)[group * (high - low) * width : (group + 1) * (high - low) * width]
            native.call(
                "round_stochastic", torch.bfloat16, part, high - low, width, start, stride, key_a, key_b
            )
        return
    for rows, index in indices(shape, box, x.device):
        part = x[rows]
        bits = hash_(index.int(), key_a, key_b).bitwise_and_(0xFFFF).view(part.shape)
        bits.masked_fill_(part.isnan(), 0)  # else NaN may become -0
        part.copy_(bits.add_(part.contiguous().view(torch.int32)).bitwise_and_(-0x10000).view(torch.float32))


def cut_off(exact: Tensor, rounded: Tensor) -> Tensor:
    """What rounding has cut off, itself cut to the dtype of `rounded`. It is less than half a spacing, so rounding the
    sum again gives the same two numbers: a skipped update changes nothing."""
    rest = exact - rounded.float()
    if rounded.dtype == torch.bfloat16 and not getattr(rest, "fake", False):
        rest = rest.view(torch.int32).bitwise_and_(-0x10000).view(torch.float32)
    return rest.to(rounded.dtype)
