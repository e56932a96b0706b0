"""The measured table of a machine (`fivefold bench hardware`): seconds by shape instead of formulas. No torch.

N ranks that compute at once have C/N cores each, and share caches, memory and clock. So everything is measured for
several N ("shares"), by all ranks at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product as combinations
from typing import Any

from fivefold.host import tables

SIZES = (64, 192, 512, 1536, 4096)
"""Sizes of each dim of a measured matmul. All combinations of at most LARGEST multiplications are measured."""
LARGEST = 2**29
FACTORS = ("compute", "messages", "host")


@dataclass(frozen=True, eq=False)  # compared by identity, so that prices can be cached
class Share:
    """Rates of one of `ranks` ranks with `threads` cores, while the others do the same work.

    products: by dtype and role ("forward": x W^T, "input": dy W, "weight": dy^T x), FLOP/s of "m x n x k" of forward's
    product (m, k) (k, n). attention: by dtype, FLOP/s in forward and backward of "tokens x head"; ring: the same of the
    parts that context parallelism puts together. streams: by dtype and kind of operation, bytes/s in forward and
    backward. encodings: by name of a compressor of gradients, [number behind the colon, seconds per element]. speed:
    what all that is multiplied by.
    """

    ranks: int
    threads: int
    products: dict[str, dict[str, dict[str, float]]]
    attention: dict[str, dict[str, list[float]]]
    ring: dict[str, dict[str, list[float]]]
    streams: dict[str, dict[str, list[float]]]
    encodings: dict[str, list[list[float]]] = field(default_factory=dict)
    speed: float = 1.0

    def product(self, m: float, n: float, k: float, dtype: str, role: str) -> float:
        """FLOP/s of a linear layer's matmuls, with (m, k) (k, n) in forward."""
        return self.speed * _rate(self, m, n, k, dtype, role)

    def attended(self, tokens: float, head: float, dtype: str, backward: bool, ring: bool) -> float:
        """FLOP/s of attention over sequences of `tokens`, or of a ring's parts of that length."""
        table = (self.ring if ring else self.attention)[dtype]
        grid = {_key(name): rates[backward] for name, rates in table.items()}
        return self.speed * _interpolated(grid, (tokens, head))

    def stream(self, kind: str, dtype: str, backward: bool) -> float:
        """Bytes/s of an element-wise operation."""
        return self.speed * self.streams[dtype][kind][backward]

    def encoding(self, compress: str) -> float | None:
        """Seconds per element in which a compressor encodes and decodes; None in a table of an older version."""
        name, _, number = compress.partition(":")
        points = self.encodings.get(name)
        return None if points is None else line_through(points, float(number or 0)) / self.speed


@lru_cache(maxsize=100_000)
def _rate(share: Share, m: float, n: float, k: float, dtype: str, role: str) -> float:
    return _interpolated(_whole_grid(share, dtype, role), (m, n, k))


@lru_cache(maxsize=256)
def _whole_grid(share: Share, dtype: str, role: str) -> dict[tuple[int, ...], float]:
    """The measured rates. A matmul too large to be measured gets the rate of the next smaller one."""
    grid = {_key(name): rate for name, rate in share.products[dtype][role].items()}
    sizes = sorted({size for key in grid for size in key})
    for key in combinations(sizes, repeat=3):  # in order: the smaller ones are there
        if key not in grid:
            longest = max(range(3), key=lambda i: key[i])
            nearer = sizes[sizes.index(key[longest]) - 1]
            grid[key] = grid[(*key[:longest], nearer, *key[longest + 1 :])]
    return grid


def _key(name: str) -> tuple[int, ...]:
    return tuple(int(size) for size in name.split("x"))


def _interpolated(grid: dict[tuple[int, ...], float], at: Sequence[float]) -> float:
    """Interpolates on a full grid, linearly in logarithms. Beyond its ends the last value holds."""
    corners = [tuple(_between(sorted({key[i] for key in grid}), x)) for i, x in enumerate(at)]
    total = 0.0
    for corner in combinations(*corners):
        share = math.prod(weight for _, weight in corner)
        total += share * math.log(grid[tuple(size for size, _ in corner)])
    return math.exp(total)


def _between(sizes: Sequence[int], x: float) -> Iterator[tuple[int, float]]:
    """The neighbours of x in `sizes`, and the weight of each."""
    x = min(max(x, sizes[0]), sizes[-1])
    above = next(i for i, size in enumerate(sizes) if size >= x)
    if sizes[above] == x:
        yield sizes[above], 1.0
        return
    low, high = sizes[above - 1], sizes[above]
    part = math.log(x / low) / math.log(high / low)
    yield low, 1.0 - part
    yield high, part


@dataclass(frozen=True, eq=False)
class Measured:
    """A machine.

    device: "cpu", whose cores the ranks share, or "cuda", of which each rank has one. cores: of either, how many.
    memory: bytes, of all. disk, disk_read, disk_both: bytes/s written, read, and of both at once;
    0: not measured. peak: FLOP/s of all cores by dtype. shares: by number of ranks. links:
    by number of ranks and collective, [bytes, seconds] of some sizes. free: share of a message's time in which the
    processor is free to compute. host: seconds of Python and dispatch (see bench/machine.py). axes: by number of ranks
    and axis, [elements of a rank's activations, seconds] that a block and microbatch take beyond the sum of its parts;
    less than nothing where other ranks compute while these wait. spread: standard deviation of the ranks' speeds.
    factors: of calibration. fitted: what they were fitted to.
    """

    machine: str
    device: str
    cores: int
    memory: float
    disk: float
    peak: dict[str, float]
    shares: dict[int, Share]
    links: dict[int, dict[str, list[list[float]]]]
    free: float
    host: dict[str, float]
    axes: dict[int, dict[str, list[list[float]]]]
    spread: float
    disk_read: float = 0.0
    disk_both: float = 0.0
    factors: dict[str, float] = field(default_factory=lambda: dict.fromkeys(FACTORS, 1.0))
    fitted: list[dict[str, Any]] = field(default_factory=list)

    @property
    def on_cpu(self) -> bool:
        """True if the processor that runs Python and moves messages also computes."""
        return self.device == "cpu"

    def fastest(self, dtype: str) -> float:
        """FLOP/s of all cores: the peak, or what any measured operation reached if that is more. So no prediction's
        MFU is above 1, even if the peak was measured while other programs took the cores."""
        reached = [self.peak[dtype]]
        for ranks, share in self.shares.items():
            together = (ranks if self.on_cpu else self.cores) / self.factors["compute"]
            grids = [*share.products.get(dtype, {}).values()]
            reached += [together * rate for grid in grids for rate in grid.values()]
            rows = [*share.attention.get(dtype, {}).values(), *share.ring.get(dtype, {}).values()]
            reached += [together * rate for rates in rows for rate in rates]
        return max(reached)

    def share(self, ranks: int) -> Share:
        """The rates of one of `ranks` ranks, as if it had cores of its own (see `Cluster.oversubscription`)."""
        return _share(self, ranks)

    def overhead(self, what: str) -> float:
        """Seconds of Python and dispatch."""
        return self.factors["host"] * self.host[what]

    def waits(self, axis: str, elements: float, ranks: int) -> float:
        """Seconds a block and microbatch that an axis takes beyond its operations and messages; beyond the measured
        sizes as at the end."""
        if not self.axes:
            return 0.0
        points = self.axes[min(self.axes, key=lambda n: abs(math.log(n / ranks)))][axis]
        return self.factors["messages"] * line_through(points, min(elements, points[-1][0]))

    def message(self, what: str, size: float, ranks: int, of: int) -> float:
        """Seconds of a collective of `size` bytes between `ranks` of `of` ranks, all of which communicate at once."""
        near = self._near(ranks)
        oversubscribed = max(1.0, of / max(ranks, self.cores))
        slower = self.factors["messages"] * oversubscribed * ranks / near
        return slower * line_through(self.links[near][what], size)

    def smallest(self, what: str, ranks: int) -> float:
        """Bytes up to which `message` is constant."""
        return self.links[self._near(ranks)][what][0][0]

    def _near(self, ranks: int) -> int:
        return min(self.links, key=lambda n: abs(math.log(n / ranks)))


@lru_cache(maxsize=64)
def _share(table: Measured, ranks: int) -> Share:
    near = table.shares[max(n for n in table.shares if n <= min(ranks, table.cores))]
    threads = max(1, table.cores // ranks) if table.on_cpu else 1
    speed = threads / near.threads / table.factors["compute"]
    return replace(near, ranks=ranks, threads=threads, speed=speed)


def line_through(points: Sequence[Sequence[float]], size: float) -> float:
    """Seconds at a size: linear between the points, constant below the first, with the last slope beyond the last."""
    if size <= points[0][0]:
        return points[0][1]
    above = next((i for i, (at, _) in enumerate(points) if at >= size), len(points) - 1)
    (a, low), (b, high) = points[above - 1], points[above]
    return low + (high - low) * (size - a) / (b - a)


AXES = {
    "tp": "tp=2", "sp": "tp=2,sp=true", "ring": "cp=2", "ulysses": "cp=2,cp_method=ulysses",
    "all_gather": "cp=2,cp_method=all_gather",
}  # fmt: skip
"""Ways of communicating within a block, with the layouts that measure `Measured.axes`."""


def save(table: Measured) -> None:
    """Writes the table of this machine into the cache's file, beside those of other machines."""
    tables.write(table.machine, as_json(table))


def load() -> Measured | None:
    """This machine's table, or None if it was not measured for this processor and torch."""
    found = tables.read(tables.key())
    return None if found is None else from_json(found)


def as_json(table: Measured) -> dict[str, Any]:
    shares = {
        str(n): {k: v for k, v in vars(share).items() if k != "speed"} for n, share in table.shares.items()
    }
    by_ranks = {name: {str(n): x for n, x in vars(table)[name].items()} for name in ("links", "axes")}
    return vars(table) | {"shares": shares} | by_ranks


def from_json(found: dict[str, Any]) -> Measured | None:
    """A table from its JSON, or None if fields are missing (a file of another version)."""
    try:
        read: dict[str, Any] = {
            name: {int(n): x for n, x in found[name].items()} for name in ("links", "axes")
        }
        if any(axes.keys() != AXES.keys() for axes in read["axes"].values()):
            return None
        read["shares"] = {int(n): Share(**share) for n, share in found["shares"].items()}
        return Measured(**found | read)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


ASSUMED_KINDS = ("norm", "gate", "gelu", "loss", "embedding", "copy", "accumulate", "random", "optimizer")
ASSUMED_COLLECTIVES = (
    "all_reduce fp32", "all_reduce bf16", "reduce_scatter fp32", "reduce_scatter bf16", "all_gather", "all_to_all",
    "scatter_gradients", "send",
)  # fmt: skip
ASSUMED_FLOPS = {"fp32": 50e9, "bf16": 100e9}
"""Of a core."""


def assumed_table(cores: int = 2, memory: float = 16e9) -> Measured:
    """The table of a machine that nobody has measured, in round numbers. Memory and traffic do not depend on it. Times
    do, so a run scales them by its own first steps (`train/prediction.py`).

    Every core multiplies at ASSUMED_FLOPS and moves 5 GB/s; messages take 0.1 ms and 1 GB/s; no Python.
    """
    host = dict.fromkeys(("block", "microbatch", "block step", "step", "stage"), 0.0)
    for zero in (1, 2, 3):
        host |= {f"zero{zero}": 0.0, f"zero{zero} step": 0.0}
    points = [[float(size), 1e-4 + size / 1e9] for size in (4096, 1 << 20, 8 << 20)]
    shapes = [shape for shape in combinations(SIZES, repeat=3) if math.prod(shape) <= LARGEST]
    shares = dict[int, Share]()
    for ranks in (n for n in (1, 2, 4) if n <= cores):
        threads = cores // ranks
        products = {
            dtype: {
                role: {f"{m}x{n}x{k}": rate * threads for m, n, k in shapes}
                for role in ("forward", "input", "weight")
            }
            for dtype, rate in ASSUMED_FLOPS.items()
        }
        parts = {f"{T}x{d}": [2e10 * threads] * 2 for T in (128, 2048) for d in (32, 128)}
        moved = {kind: [5e9 * threads] * 2 for kind in ASSUMED_KINDS}
        attention, streams = dict.fromkeys(ASSUMED_FLOPS, parts), dict.fromkeys(ASSUMED_FLOPS, moved)
        shares[ranks] = Share(ranks, threads, products, attention, attention, streams)
    return Measured(
        machine=tables.key(),
        device="cpu",
        cores=cores,
        memory=memory,
        disk=1e9,
        peak={dtype: rate * cores for dtype, rate in ASSUMED_FLOPS.items()},
        shares=shares,
        links={n: dict.fromkeys(ASSUMED_COLLECTIVES, points) for n in (2, 4)},
        free=0.25,
        host=host,
        axes={},
        spread=0.0,
    )
