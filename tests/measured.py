"""A made-up table of a machine, for tests of what is predicted from one."""

from itertools import product

from fivefold.host import tables
from fivefold.plan.measured import LARGEST, SIZES, Measured, Share

KINDS = ("norm", "gate", "gelu", "loss", "embedding", "copy", "accumulate", "random", "optimizer")
LINKS = (
    "all_reduce fp32", "all_reduce bf16", "reduce_scatter fp32", "reduce_scatter bf16", "all_gather", "all_to_all",
    "scatter_gradients", "send",
)  # fmt: skip
FLOPS = {"fp32": 50e9, "bf16": 100e9}  # of a core


def table(cores: int = 2) -> Measured:
    """Every core multiplies at FLOPS and moves 5 GB/s; messages take 0.1 ms and 1 GB/s; no Python."""
    host = dict.fromkeys(("block", "microbatch", "block step", "step", "stage"), 0.0)
    for zero in (1, 2, 3):
        host |= {f"zero{zero}": 0.0, f"zero{zero} step": 0.0}
    points = [[float(size), 1e-4 + size / 1e9] for size in (4096, 1 << 20, 8 << 20)]
    return Measured(
        machine=tables.key(),
        device="cpu",
        cores=cores,
        memory=16e9,
        disk=1e9,
        peak={dtype: rate * cores for dtype, rate in FLOPS.items()},
        shares={n: _share(n, cores // n) for n in (1, 2, 4) if n <= cores},
        links={n: dict.fromkeys(LINKS, points) for n in (2, 4)},
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
