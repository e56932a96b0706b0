"""Matmuls with weights in fp32 on the CPU: oneDNN beside MKL, PyTorch's default.

    python benchmarks/products.py [--threads 1 2] [--out benchmarks/results/products.json]

Shapes of the common work (2,048 tokens, D 384, ffn 1024, V 4096): forward x W^T, gradient of the input dy W, gradient
of the weight dy^T x. The two take turns, product by product; the ratio is that of the medians. No rule holds on all
machines: on Zen 4 MKL was faster in the third, on Zen 5 oneDNN. So `kernels/native.py` measures each class of shapes
on the machine that trains.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

N = 2048
SHAPES = {
    "qkv": (384, 1152),
    "proj": (384, 384),
    "gate, up": (384, 2048),
    "down": (1024, 384),
    "vocab": (384, 4096),
}
REPEATS = 15


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [row for threads in args.threads for row in measure(threads)]
    print(f"{'':10} {'product':16} threads   MKL  oneDNN GFLOP/s  ratio")
    for r in rows:
        speeds = f"{r['mkl'] / 1e9:5.0f} {r['onednn'] / 1e9:7.0f} {r['ratio']:14.2f}"
        print(f"{r['shape']:10} {r['product']:16} {r['threads']:7} {speeds}")
    if args.out:
        from fivefold.host.machine import describe

        args.out.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")


def onednn(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T"""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def measure(threads: int) -> list[dict]:
    torch.set_num_threads(threads)
    rows = []
    for shape, (D, F) in SHAPES.items():
        x, weight, dy = torch.randn(N, D), torch.randn(F, D), torch.randn(N, F)
        products: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
            "forward": (lambda x=x, w=weight: x @ w.t(), lambda x=x, w=weight: onednn(x, w)),
            "input gradient": (lambda dy=dy, w=weight: dy @ w, lambda dy=dy, w=weight: onednn(dy, w.t())),
            "weight gradient": (lambda dy=dy, x=x: dy.t() @ x, lambda dy=dy, x=x: onednn(dy.t(), x.t())),
        }
        for name, pair in products.items():
            laps: tuple[list[float], list[float]] = ([], [])
            for _ in range(REPEATS):
                for work, times in zip(pair, laps, strict=True):
                    began = time.perf_counter()
                    work()
                    times.append(time.perf_counter() - began)
            mkl, other = (2 * N * D * F / median(times) for times in laps)
            rows.append(
                {
                    "shape": shape,
                    "product": name,
                    "threads": threads,
                    "mkl": mkl,
                    "onednn": other,
                    "ratio": other / mkl,
                }
            )
    return rows


if __name__ == "__main__":
    main()
