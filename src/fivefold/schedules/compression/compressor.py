"""What a compressor is to everyone who does not run it.

Each file beside this one has a family of compressors, and `comm/compress.py` has a class that runs it.
Parameters are compressed one by one, never together. So a parameter that several tensor-parallel ranks have whole gets
the same bits on each of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Shape = tuple[int, ...]


class Wire(NamedTuple):
    """A message. what: operation of `comm.Axis`. size: bytes of its input or output, whichever is larger."""

    what: str
    size: int


@dataclass(frozen=True)
class Compressor(ABC):
    """Sums the gradients of a bucket over ranks with fewer bytes. text: as a recipe writes it.

    passes: fp32 gradients that encoding and decoding read or write on one of two ranks, counted operation by operation.
    The planner prices them as traffic of memory. whole: share of a run's steps, the first ones, that are better summed
    whole: weights change most in them.
    """

    text: str
    passes: float
    whole: float = field(default=0.1, kw_only=True)

    @abstractmethod
    def messages(self, shapes: Sequence[Shape], ranks: int) -> tuple[Wire, ...]:
        """The messages of a bucket, in their order. Each needs what the one before it brought."""

    @abstractmethod
    def kept(self, shapes: Sequence[Shape], ranks: int) -> int:
        """Bytes that stay on a rank from step to step: what it has not sent yet, and what a warm start needs."""

    @abstractmethod
    def scratch(self, shapes: Sequence[Shape], ranks: int) -> int:
        """Bytes that encoding or decoding needs for a moment, besides the messages."""

    @property
    def family(self) -> str:
        """Name of the file that has its class, by which `comm/compress.py` finds what runs it."""
        return type(self).__module__.rpartition(".")[2]


def sizes(shapes: Sequence[Shape]) -> list[int]:
    return [math.prod(shape) for shape in shapes]
