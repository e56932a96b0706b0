"""Random bits that depend only on a key and an element's index: equal on every layout, device and shard.

The 64-bit hash is SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"; constants of
Stafford's mix 13). The 32-bit one is MurmurHash3's finalizer. Both are integer operations, exact everywhere.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

CHUNK = 1 << 17  # elements made at once on a CPU: their scratch memory (4 MB) stays in its cache


def keys(text: str) -> tuple[int, int]:
    """Two 64-bit keys of a text, as signed numbers (torch has no unsigned arithmetic)."""
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    a, b = (int.from_bytes(half, "little", signed=True) for half in (digest[:8], digest[8:]))
    return a, b


def chunk_on(device: torch.device) -> int:
    """Elements that a device makes at once. On a GPU each chunk costs launches of kernels."""
    return CHUNK if device.type == "cpu" else 64 * CHUNK


def indices(
    shape: Sequence[int], box: Sequence[tuple[int, int]], device: torch.device
) -> Iterator[tuple[slice, Tensor]]:
    """The flat indices of a box's elements in a tensor of this shape, in pieces of about `chunk_on`: (rows of the
    box, int64 indices (rows x elements of a row))."""
    assert all(0 <= a <= b <= n for n, (a, b) in zip(shape, box, strict=True)), (shape, box)
    (first, last), inner_strides = box[0], [math.prod(shape[i + 1 :]) for i in range(1, len(shape))]
    inner = torch.zeros(1, dtype=torch.int64, device=device)  # offsets of one row's elements
    for (a, b), stride in zip(box[1:], inner_strides, strict=True):
        inner = (inner[:, None] + torch.arange(a, b, device=device) * stride).view(-1)
    row_stride, rows = math.prod(shape[1:]), max(1, chunk_on(device) // max(1, inner.numel()))
    for row in range(first, last, rows):
        ids = torch.arange(row, min(row + rows, last), device=device)
        yield slice(row - first, row - first + len(ids)), (ids[:, None] * row_stride + inner).view(-1)


def hash_(x: Tensor, key_a: int, key_b: int) -> Tensor:
    """Hashes numbers in place: int64, or int32 with half the memory traffic. The second key is added between the
    rounds, so that no two keys' sequences are shifts of each other. Products wrap around; `& mask` makes the arithmetic
    shift a logical one."""
    bits, (start, first, second), shifts = MIXES[x.dtype]
    shifted = torch.empty_like(x)
    x.mul_(_signed(start, bits)).add_(_signed(key_a, bits))
    for shift, factor in zip(shifts, (first, second, None), strict=True):
        torch.bitwise_right_shift(x, shift, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_((1 << (bits - shift)) - 1))
        if factor is not None:
            x.mul_(_signed(factor, bits))
        if factor == first:
            x.bitwise_xor_(_signed(key_b, bits))
    return x


MIXES = {
    torch.int64: (64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB), (30, 27, 31)),
    torch.int32: (32, (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35), (16, 13, 16)),
}
"""Bits, factors and shifts of SplitMix64 and of MurmurHash3's finalizer."""


def _signed(value: int, bits: int) -> int:
    """The last bits of a number, as a signed one."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


ROW = 4096
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def digest(x: Tensor) -> Tensor:
    """A hash of a tensor's bits: an int64 scalar on its device, the same on every device.

    Each row of 4096 numbers is a sum of products with odd factors, so a change of one number always changes it. The
    hashes of rows, with their numbers, are added up.
    """
    flat = x.detach().contiguous().view(-1)
    words = flat.view(_WORDS[flat.element_size()])
    factors, total = _factors(words.device), torch.zeros((), dtype=torch.int64, device=words.device)
    key_a, key_b = keys("digest")
    step = chunk_on(words.device)
    for start in range(0, words.numel(), step):
        part = words[start : start + step].to(torch.int32)
        whole = part.numel() // ROW * ROW
        sums = [(part[:whole].view(-1, ROW) * factors).sum(1)]  # int64
        if whole < part.numel():
            rest = part[whole:]
            sums.append((rest * factors[: rest.numel()]).sum().view(1))
        rows = torch.cat(sums)
        number = torch.arange(start // ROW, start // ROW + len(rows), device=rows.device)
        total += hash_(rows.add_(number * _signed(0x9E3779B97F4A7C15, 64)), key_a, key_b).sum()
    return total + x.numel()


@lru_cache(maxsize=8)
def _factors(device: torch.device) -> Tensor:
    """ROW odd int32 numbers."""
    return hash_(torch.arange(ROW, dtype=torch.int32), *keys("factors")).bitwise_or_(1).to(device)
