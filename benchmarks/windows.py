"""Attention with a sliding window on a CPU: what it costs, relative to whole sequences, beside its share of the FLOPs.

    python benchmarks/windows.py [--out benchmarks/results/windows.json]

A sequence of 8192 tokens, forward and backward, one thread. Both sides run in turns in one process, and the processor
seconds of each side's fastest turn count. share: of the pairs of a query and a key that the window leaves. tiles: of
the scores that the kernel computes, which are blocks of queries with the keys that any of them sees. Half a minute.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from fivefold.kernels.blockwise_attention import Scores, qkv_attention
from fivefold.kernels.sizes import query_blocks

T, D_HEAD, TURNS = 8192, 64, 3
SHAPES = [("float32", 4, 4), ("bfloat16", 6, 6), ("bfloat16", 8, 2)]
WINDOWS = (1024, 2048, 4096)


def seconds(qkv: torch.Tensor, dout: torch.Tensor, heads: int, kv_heads: int, window: int) -> float:
    begun = time.process_time()
    qkv_attention(qkv, heads, kv_heads, None, None, True, scores=Scores(window)).backward(dout)
    qkv.grad = None
    return time.process_time() - begun


def scores(element_size: int, window: int) -> int:
    return sum((end - start) * keys for start, end, keys in query_blocks(T, True, element_size, window))


def measured(dtype: str, heads: int, kv_heads: int) -> list[dict[str, Any]]:
    kind = getattr(torch, dtype)
    qkv = torch.randn(1, T, (heads + 2 * kv_heads) * D_HEAD).to(kind).requires_grad_()
    dout = torch.randn(1, T, heads * D_HEAD).to(kind)
    sides = {window: [seconds(qkv, dout, heads, kv_heads, window)] for window in (0, *WINDOWS)}
    for window in [*sides] * TURNS:
        sides[window].append(seconds(qkv, dout, heads, kv_heads, window))
    whole = min(sides[0][1:])
    return [
        {
            "dtype": dtype, "heads": heads, "kv_heads": kv_heads, "window": window,
            "share": (window * T - window * (window - 1) / 2) / (T * (T + 1) / 2),
            "tiles": scores(kind.itemsize, window) / scores(kind.itemsize, 0),
            "cost": min(sides[window][1:]) / whole,
        }
        for window in WINDOWS
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/windows.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [row for shape in SHAPES for row in measured(*shape)]
    for row in rows:
        over = row["cost"] / row["share"] - 1
        print(f"{row['dtype']:9} {row['heads']}/{row['kv_heads']} heads, window {row['window']}: "
              f"{row['share']:.1%} of the pairs, {row['tiles']:.1%} of the scores, {row['cost']:.1%} of the time "
              f"({over:+.0%})")  # fmt: skip
    options.out.write_text(
        json.dumps({"T": T, "head": D_HEAD, "turns": TURNS, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
