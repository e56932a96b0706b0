"""Compressed sums of gradients with error feedback (arXiv 1901.09847): what a message leaves out is added to the next
step's gradient. Each family of `schedules/compression` has a file of the same name here, with a class `Sum`.

Error feedback: a rank adds its gradient to the residual, sends what the compressor makes of that, and keeps the rest as
the residual. So over the ranks the sum that everyone gets and the residuals add up to the gradients and the residuals
before. All ranks decode the same bytes in the same order, so they get the same bits.

A gradient that is not finite makes the whole bucket's sum not finite, so the step is skipped on every rank. Its
residuals then begin at zero again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from importlib import import_module

import torch
from torch import Tensor

from fivefold.comm.axis import Axis, Started
from fivefold.schedules.compression import Compressor
from fivefold.schedules.compression.compressor import sizes

Messages = Generator[Started, Tensor, None]
"""Yields each message after it has started, and is sent its result."""


class CompressedSum(ABC):
    """shapes: of the bucket's parameters. residual: this rank's, flat, fp32. residuals: its parts of each parameter;
    empty for those that are sent whole. steps: of the run, so far. after: the first steps, which send everything."""

    residual: Tensor
    residuals: list[Tensor]
    after: int = 0

    def __init__(self, shapes: Sequence[tuple[int, ...]], axis: Axis, number: int):
        self.shapes, self.sizes, self.axis, self.number = list(shapes), sizes(shapes), axis, number
        self.steps = 0
        self._before: list[Tensor] = []

    def sum(self, gradients: Tensor) -> Messages:
        """Replaces this rank's gradients (E) by the sum over all ranks."""
        if self.steps < self.after:
            yield self.axis.start_all_reduce(gradients)
        else:
            yield from self._sum(gradients)
        self.steps += 1

    @abstractmethod
    def _sum(self, gradients: Tensor) -> Messages:
        """The compressed sum."""

    def state(self) -> dict[str, Tensor]:
        """What stays from step to step, besides `steps`. Loading writes into these tensors."""
        return {"residual": self.residual}

    def errors(self) -> list[float]:
        """For each parameter the part of gradient and residual that the last step did not send, as a share of its
        norm; 0 before the first step, and for parameters that are sent whole."""
        if not self._before:
            return [0.0] * len(self.sizes)
        pairs = zip(_norms(self.residuals), self._before, strict=True)
        return torch.stack([after / before.clamp(min=1e-30) for after, before in pairs]).tolist()

    def _add(self, gradients: Sequence[Tensor]) -> None:
        """Adds gradients to the residuals. gradients: flat; empty where the residual is."""
        torch._foreach_add_(self.residuals, list(gradients))
        self._before = _norms(self.residuals)

    def _keep_if(self, finite: Tensor) -> None:
        """Sets the residual to zero unless the step's sum is finite. finite: a bool without dims."""
        self.residual.masked_fill_(~finite, 0)


def compressed_sum(
    compressor: Compressor, shapes: Sequence[tuple[int, ...]], axis: Axis, number: int
) -> CompressedSum:
    """The compressed sum of a bucket's gradients over an axis. shapes: of its parameters. number: the bucket's."""
    return import_module(f"{__name__}.{compressor.family}").Sum(compressor, shapes, axis, number)


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_norm(tensors))


def uniform(count: int, step: int, number: int, device: torch.device) -> Tensor:
    """`count` random numbers in [0, 1), fp64, the same on every rank and device: a hash of (step, number, index), by
    SplitMix64 as initial weights are (models/base.py)."""
    x = torch.arange(count, device=device) * _signed(0x9E3779B97F4A7C15)
    x += _signed((step * 0xD1B54A32D192ED03) ^ (number * 0x8CB92BA72F3D8DD7))
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return _shifted(x ^ _shifted(x, 31), 11).double() * 2.0**-53


def _signed(x: int) -> int:
    """The int64 with the lowest 64 bits of a whole number."""
    return (x + 2**63) % 2**64 - 2**63


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shifts the bits of int64 to the right, as those of a number without sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)
