"""Prices single operations on a device by tiles and waves, or by bytes and bandwidth."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

from fivefold.models.operations import Matmul, Sizes
from fivefold.plan.cluster.devices import Device
from fivefold.precision import DTYPES, MASTER
from fivefold.schedules.compression import Compressor

# Tiles of a matmul's result that one processor computes at once, and the share of the best rate that each reaches.
# Smaller tiles read their factors more often.
TILES = (((256, 128), 1.0), ((128, 256), 1.0), ((128, 128), 0.92), ((64, 128), 0.75), ((64, 64), 0.6))
FILL = 128  # of the inner dim: what starting a tile and writing its result take
SHORT = 500  # tokens: attention reaches half its rate on sequences this long (arXiv 2307.08691, figure 5)


def products(p: Matmul, device: Device, dtype: str, e: float) -> tuple[float, float, float]:
    """Seconds of a matmul (m, k) (k, n) in forward, of its input gradient, and of its weight gradient."""
    if device.measured:
        flops = 2 * p.m * p.n * p.k * p.count
        forward, first, second = (
            flops / device.measured.product(p.m, p.n, p.k, dtype, role)
            for role in ("forward", "input", "weight")
        )
        return forward, first, second
    return (
        matmul(p, device, dtype, e),
        matmul(Matmul(p.m, p.k, p.n, p.count, p.weight), device, dtype, e),
        matmul(Matmul(p.k, p.n, p.m, p.count, p.weight), device, dtype, e),
    )


@lru_cache(maxsize=100_000)
def matmul(product: Matmul, device: Device, dtype: str, e: float) -> float:
    """Seconds of `product.count` matmuls: whole waves of tiles over the processors, or the bytes moved."""
    m, n, k = product.m, product.n, product.k
    rate = device.peak[dtype] * device.matmul / device.units
    waves = math.inf
    for (rows, columns), share in TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns) * product.count
        split = 1
        if tiles < device.units / 2:  # the inner dim is divided between processors
            split = min(math.floor(device.units / tiles), max(1, math.floor(k / 512)))
        wave = 2 * rows * columns * (k / split + FILL) / (rate * share)
        waves = min(waves, math.ceil(tiles * split / device.units) * wave)
    moved = product.count * (m * k + k * n + m * n) * e / (device.bandwidth * device.streaming)
    return max(waves, moved)


def attention(
    flops: float, tokens: float, head: float, device: Device, dtype: str, backward: bool, parts: int = 1
) -> float:
    """Seconds of fused attention with `flops` in forward (2.5 times as many in backward) over sequences of `tokens`.

    parts: number of partial attentions that a ring merges. Heads narrower than 128 are slower, because they do as many
    exponentials for fewer FLOPs."""
    if device.measured:
        rate = device.measured.attended(tokens / parts, head, dtype, backward, parts > 1)
        return flops * (2.5 if backward else 1.0) / rate
    share = device.attention[backward] * tokens / (tokens + SHORT) * min(1.0, 0.55 + 0.45 * head / 128)
    return flops * (2.5 if backward else 1.0) / (device.peak[dtype] * share)


def stream(size: float, device: Device, like: str = "copy", dtype: str = "", backward: bool = False) -> float:
    """Seconds to read and write `size` bytes of memory in an operation like this measured one."""
    if device.measured:
        return size / device.measured.stream(like, dtype, backward) if size else 0.0
    return size / (device.bandwidth * device.streaming)


def rounding(elements: float, device: Device, dtype: str, s: Sizes) -> float:
    """Seconds to round the factors of a matmul: they are read twice, for the scale and for the numbers."""
    return stream((2 * s.e + s.narrow) * elements, device, "copy", dtype)


def encoding(elements: float, compress: Compressor, device: Device) -> float:
    """Seconds to encode and decode the compressed sum of so many gradients. It is measured with the machine; elsewhere
    it is memory traffic."""
    if device.measured and (each := device.measured.encoding(compress.text)) is not None:
        return elements * each
    return stream(compress.passes * DTYPES[MASTER].bytes * elements, device, "copy", MASTER)


@lru_cache
def slowest(devices: int, spread: float) -> float:
    """How much longer the slowest of so many equal devices takes than one on average: all wait for it. The expected
    largest of as many normal numbers (Blom's formula) times their standard deviation."""
    if devices == 1:
        return 1.0
    return 1.0 + spread * NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))


def random(numbers: float, device: Device, dtype: str = "fp32") -> float:
    """Seconds to draw numbers with Philox-4x32-10: about 20 integer operations each, at half the rate of fp32 FLOPs.
    A TPU's data sheet has no such rate: there they cost nothing."""
    if device.measured:
        return numbers / device.measured.stream("random", dtype, False) if numbers else 0.0
    return 20 * numbers / (device.peak.get(MASTER, math.inf) / 2)
