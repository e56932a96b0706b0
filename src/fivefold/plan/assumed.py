"""The table of a machine that nobody has measured: round numbers of a processor's core. No torch.

Memory and traffic do not depend on it. Times do, so a run scales them by its own first steps
(`train/prediction.py`).
"""

from __future__ import annotations

from itertools import product

from fivefold.host import tables
from fivefold.plan.measured import LARGEST, SIZES, Measured, Share

KINDS = ("norm", "gate", "gelu", "loss", "embedding", "copy", "accumulate", "random", "optimizer")
COLLECTIVES = (
    "all_reduce fp32", "all_reduce bf16", "reduce_scatter fp32", "reduce_scatter bf16", "all_gather", "all_to_all",
    "scatter_gradients", "send",
)  # fmt: skip
FLOPS = {"fp32": 50e9, "bf16": 100e9}
"""Of a core."""


def table(cores: int = 2, memory: float = 16e9) -> Measured:
    """Every core multiplies at FLOPS and moves 5 GB/s; messages take 0.1 ms and 1 GB/s; no Python."""
    host = dict.fromkeys(("block", "microbatch", "block step", "step", "stage"), 0.0)
    for zero in (1, 2, 3):
        host |= {f"zero{zero}": 0.0, f"zero{zero} step": 0.0}
    points = [[float(size), 1e-4 + size / 1e9] for size in (4096, 1 << 20, 8 << 20)]
    return Measured(
        machine=tables.key(),
        device="cpu",
        cores=cores,
        memory=memory,
        disk=1e9,
        peak={dtype: rate * cores for dtype, rate in FLOPS.items()},
        shares={n: _share(n, cores // n) for n in (1, 2, 4) if n <= cores},
        links={n: dict.fromkeys(COLLECTIVES, points) for n in (2, 4)},
        free=0.25,
        host=host,
        axes={},
        spread=0.0,
    )


def _share(ranks: int, threads: int) -> Share:
    shapes = [shape for shape in product(SIZES, repeat=3) if shape[0] * shape[1] * shape[2] <= LARGEST]
    products = {
        dtype: {
            role: {f"{m}x{n}x{k}": rate * threads for m, n, k in shapes}
            for role in ("forward", "input", "weight")
        }
        for dtype, rate in FLOPS.items()
    }
    parts = {
        dtype: {f"{T}x{d}": [2e10 * threads] * 2 for T in (128, 2048) for d in (32, 128)} for dtype in FLOPS
    }
    moved = {dtype: {kind: [5e9 * threads] * 2 for kind in KINDS} for dtype in FLOPS}
    return Share(ranks, threads, products, parts, parts, moved)
