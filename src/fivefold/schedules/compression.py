"""Compression of gradient sums as data: what each compressor puts on the wire and keeps, by the shapes of a bucket's
parameters. `comm/compress.py` executes these sizes, with a class for each family, and the planner reads them. No torch.

Parameters are compressed one by one, never together. So a parameter that several tensor-parallel ranks have whole gets
the same bits on each of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from statistics import NormalDist
from typing import NamedTuple

from fivefold.errors import UserError, did_you_mean

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


def sizes(shapes: Sequence[Shape]) -> list[int]:
    return [math.prod(shape) for shape in shapes]


LARGEST = {8: 127, 4: 7}
"""What the largest element of a block becomes, by bits."""


@lru_cache(maxsize=2)
def dynamic(signed: bool) -> tuple[float, ...]:
    """The 256 values of the dynamic map (arXiv 2110.02861), ascending, from -1 or 0 to 1: a power of ten times a linear
    fraction. The larger the power, the more fractions."""
    values, bits = [0.0, 1.0], 6 if signed else 7
    for power in range(bits + 1):  # 1, 2, 4, ... 2^bits fractions, in the middle of equal parts of [0.1, 1]
        parts = 2**power
        middles = (0.1 + 0.9 * (i + 0.5) / parts for i in range(parts))
        values += [10.0 ** (power - bits) * middle for middle in middles]
    if signed:
        return tuple(sorted(values + [-value for value in values[2:]]))
    values.sort()
    return (0.0, *values[2:])  # one too many: the smallest


def normal() -> tuple[float, ...]:
    """The 16 values of NormalFloat (QLoRA, arXiv 2305.14314, appendix E), ascending, from -1 to 1: quantiles of normal
    numbers, 0 among them, so that each value stands for about as many numbers. The last quantile is the mean of the
    last ones of 15 and of 16 equal parts."""
    last = 1 - (1 / 30 + 1 / 32) / 2
    halves = ([NormalDist().inv_cdf(last - (last - 0.5) * i / n) for i in range(n)] for n in (7, 8))
    below, above = ([value / half[0] for value in half] for half in halves)
    return tuple(sorted([*(-value for value in below), 0.0, *above]))


@dataclass(frozen=True)
class Blocks(Compressor):
    """Few bits per element, with a scale per block: int8 and int4 (largest element), and 1 bit (mean magnitude: 1-bit
    SGD, Seide et al., Interspeech 2014; 1-bit Adam, arXiv 2102.02888). The levels of int8 and int4 are equally far
    apart. Gradients are not spread evenly, so `nf4` and `dynamic8` have levels that are closer where more numbers are.

    Each rank owns a chunk of the bucket. It gets the others' encoded gradients of its chunk (all-to-all), sums them in
    fp32, and sends the encoded sum to everyone (all-gather). Its own gradient of its chunk is never encoded.

    bits: per element. block: elements that share a scale (fp32). Each parameter begins a new block. levels: what
    the codes stand for, as shares of a block's largest element, ascending; none: they are equally far apart.
    """

    bits: int
    block: int
    levels: tuple[float, ...] = ()

    def starts(self, shapes: Sequence[Shape]) -> list[int]:
        """The element at which each parameter begins, and the end, if each fills whole blocks."""
        found = [0]
        for size in sizes(shapes):
            found.append(found[-1] + math.ceil(size / self.block) * self.block)
        return found

    def chunk(self, shapes: Sequence[Shape], ranks: int) -> int:
        """Blocks of a rank's chunk; the last chunks may end in empty blocks."""
        return math.ceil(self.starts(shapes)[-1] / self.block / ranks)

    def row(self, blocks: int) -> int:
        """Bytes of so many encoded blocks: the elements, then the scales."""
        return blocks * (self.block * self.bits // 8 + 4)

    @property
    def per_element(self) -> float:
        """Bytes of an element of whole blocks."""
        return self.row(1) / self.block

    def messages(self, shapes: Sequence[Shape], ranks: int) -> tuple[Wire, ...]:
        size = ranks * self.row(self.chunk(shapes, ranks))
        return Wire("all_to_all", size), Wire("all_gather", size)

    def kept(self, shapes: Sequence[Shape], ranks: int) -> int:
        return 4 * ranks * self.chunk(shapes, ranks) * self.block

    def scratch(self, shapes: Sequence[Shape], ranks: int) -> int:
        """A chunk in fp32; its bits as bytes, twice, or its codes as bytes and in int32 with their levels."""
        return (13 if self.levels else 4 if self.bits == 8 else 6) * self.chunk(shapes, ranks) * self.block


INT8 = Blocks("int8", 22.0, bits=8, block=256, whole=0.0)
INT4 = Blocks("int4", 38.0, bits=4, block=256, whole=0.0)


@dataclass(frozen=True)
class LowRank(Compressor):
    """PowerSGD (arXiv 1905.13727): a matrix M (m, n) is sent as P (m, r) and Q (n, r), with r far smaller than m and n.

    P = M Q is summed and made orthonormal, then Q = M^T P is summed; the result is P Q^T. Q is the start of the next
    step (one step of a power iteration per training step). Vectors, and matrices that this would not make smaller, are
    summed as they are, together with P. rank: r.
    """

    rank: int

    def matrix(self, shape: Shape) -> tuple[int, int] | None:
        """(m, n) of a parameter; of more than two dims, all but the last are rows. None: it is summed as it is."""
        if len(shape) < 2:
            return None
        m, n = math.prod(shape[:-1]), shape[-1]
        return (m, n) if self.rank * (m + n) < m * n else None

    def messages(self, shapes: Sequence[Shape], ranks: int) -> tuple[Wire, ...]:
        matrices = [self.matrix(shape) for shape in shapes]
        plain = sum(math.prod(shape) for shape, two in zip(shapes, matrices, strict=True) if two is None)
        first = Wire("all_reduce", 4 * (plain + self.rank * sum(two[0] for two in matrices if two)))
        second = Wire("all_reduce", 4 * self.rank * sum(two[1] for two in matrices if two))
        return (first, second) if second.size else (first,)

    def kept(self, shapes: Sequence[Shape], ranks: int) -> int:
        matrices = [two for two in map(self.matrix, shapes) if two]
        return 4 * sum(m * n + self.rank * n for m, n in matrices)

    def scratch(self, shapes: Sequence[Shape], ranks: int) -> int:
        """P and Q of all matrices."""
        return 4 * self.rank * sum(m + n for m, n in filter(None, map(self.matrix, shapes)))


def rank(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError("must be a rank, a whole number >= 1")
    return int(text)


STRETCH = 2**16


@dataclass(frozen=True)
class Sparse(Compressor):
    """A share of each parameter's elements: the largest (top-k), or random ones (random-k); see arXiv 1901.09847.

    Top-k: each rank has its own elements, so values and indices travel (all-gather). They are the largest of each
    stretch of 65,536 elements, so that an index has 16 bits. Random-k: all ranks draw the same elements from the number
    of the step, so only values travel, and they can be summed on the way (all-reduce).

    share: of each stretch's elements, at least one of them.
    """

    share: float

    @abstractmethod
    def stretches(self, shapes: Sequence[Shape]) -> list[int]:
        """Elements of each stretch, one after the other. None reaches into another parameter."""

    def counts(self, shapes: Sequence[Shape]) -> list[int]:
        """Elements that are sent of each stretch."""
        return [math.ceil(self.share * size) for size in self.stretches(shapes)]

    def kept(self, shapes: Sequence[Shape], ranks: int) -> int:
        return 4 * sum(sizes(shapes))


@dataclass(frozen=True)
class TopK(Sparse):
    def stretches(self, shapes: Sequence[Shape]) -> list[int]:
        return [min(STRETCH, size - start) for size in sizes(shapes) for start in range(0, size, STRETCH)]

    def messages(self, shapes: Sequence[Shape], ranks: int) -> tuple[Wire, ...]:
        """A value (bf16) and an index (16 bits) per element."""
        return (Wire("all_gather", ranks * (2 + 2) * sum(self.counts(shapes))),)

    def scratch(self, shapes: Sequence[Shape], ranks: int) -> int:
        """Absolute values of a stretch; indices (int64) and values."""
        return 4 * min(STRETCH, max(sizes(shapes))) + (8 + 8) * sum(self.counts(shapes))


@dataclass(frozen=True)
class RandomK(Sparse):
    def stretches(self, shapes: Sequence[Shape]) -> list[int]:
        return sizes(shapes)

    def messages(self, shapes: Sequence[Shape], ranks: int) -> tuple[Wire, ...]:
        """A value (fp32) per element."""
        return (Wire("all_reduce", 4 * sum(self.counts(shapes))),)

    def scratch(self, shapes: Sequence[Shape], ranks: int) -> int:
        """Random numbers (fp64) and indices (int64)."""
        return (8 + 8) * sum(self.counts(shapes))


def share(text: str) -> float:
    found = float(text)
    if not 0 < found <= 1:
        raise ValueError("must be a share of the elements, above 0 and at most 1")
    return found


NONE = "none"
EXAMPLES: dict[str, Callable[[str], Compressor]] = {
    "int8": lambda text: INT8,
    "int4": lambda text: INT4,
    "nf4": lambda text: Blocks(text, 38.0, bits=4, block=256, levels=normal(), whole=0.0),
    "dynamic8": lambda text: Blocks(text, 38.0, bits=8, block=256, levels=dynamic(True), whole=0.0),
    "1bit": lambda text: Blocks(text, 38.0, bits=1, block=64),
    "powersgd:4": lambda text: LowRank(text, 9.0, rank(text.partition(":")[2])),
    "topk:0.01": lambda text: TopK(text, 12.0, share(text.partition(":")[2])),
    "randk:0.01": lambda text: RandomK(text, 7.0, share(text.partition(":")[2])),
}
"""{an example of the text: constructor}."""
_BY_NAME = {example.partition(":")[0]: (example, make) for example, make in EXAMPLES.items()}
TEXTS = (NONE, *EXAMPLES)
"""What `layout.compress` may be, with examples of numbers."""


@cache
def compressor(text: str) -> Compressor | None:
    """The compressor that a recipe's text means; None for "none". Raises UserError: there is none with this name, or
    its number is not valid."""
    if text == NONE:
        return None
    name, colon, number = text.partition(":")
    valid = f"valid: {', '.join(TEXTS)}"
    if name not in _BY_NAME:
        raise UserError(f"compress: '{text}' is unknown{did_you_mean(name, [NONE, *_BY_NAME])} ({valid})")
    example, make = _BY_NAME[name]
    if bool(colon) != (":" in example) or (colon and not number):
        raise UserError(f"compress: '{text}' must be written like '{example}' ({valid})")
    try:
        return make(text)
    except ValueError as error:
        why = str(error) if str(error).startswith("must") else "must be a number"
        raise UserError(f"compress: '{text}': what follows the colon {why} ({valid})") from None


def problem(text: str) -> str:
    """The error of a text; "" if it is valid."""
    try:
        compressor(text)
    except UserError as error:
        return str(error)
    return ""
