"""Compressed sums of gradients with error feedback (arXiv 1901.09847): what a message leaves out is added to the next
step's gradient. Each family of `schedules/compression` has a file of the same name here, with a class `Sum`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from fivefold.comm.axis import Axis
from fivefold.comm.compress.base import CompressedSum
from fivefold.schedules.compression import Compressor


def compressed_sum(
    compressor: Compressor, shapes: Sequence[tuple[int, ...]], axis: Axis, number: int
) -> CompressedSum:
    """The compressed sum of a bucket's gradients over an axis. shapes: of its parameters. number: the bucket's."""
    return import_module(f"{__name__}.{compressor.family}").Sum(compressor, shapes, axis, number)
