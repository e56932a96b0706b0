"""The fused CPU kernels beside PyTorch's own operations, forward and backward, on the shapes of the common work.

    python benchmarks/kernels.py [--threads 1] [--out benchmarks/results/kernels.json]

One process, all cores unless --threads says fewer; fused and plain take turns; the figure is the ratio of medians
(plain / fused).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

from fivefold.host.machine import keep_freed_memory
from fivefold.kernels import elementwise, native
from fivefold.kernels.blockwise_attention import qkv_attention
from fivefold.kernels.matmul import linear_cross_entropy

B, T, H, d, D, FFN, V = 4, 256, 6, 64, 384, 1024, 4096


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if native.why_not():
        raise SystemExit(f"no fused kernels here: {native.why_not()}")
    keep_freed_memory()
    results = {}
    for dtype in (torch.bfloat16, torch.float32):
        for name, (fused, plain, inputs) in cases().items():
            inputs = [x.to(dtype).requires_grad_() for x in inputs]
            ours, theirs = compare(partial(fused, *inputs), partial(plain, *inputs), inputs)
            key = f"{name} {str(dtype).removeprefix('torch.')}"
            results[key] = {"fused_ms": ours * 1e3, "plain_ms": theirs * 1e3, "ratio": theirs / ours}
            print(
                f"{key:36} fused {ours * 1e3:7.2f} ms   plain {theirs * 1e3:7.2f} ms   {theirs / ours:5.2f} x"
            )
    if args.out:
        from fivefold.host.machine import describe

        args.out.write_text(
            json.dumps({"threads": args.threads, "results": results, "machine": describe()}, indent=1) + "\n"
        )


def cases() -> dict[str, tuple[Callable, Callable, list[torch.Tensor]]]:
    angles = torch.outer(torch.arange(T).float(), 10000.0 ** -(torch.arange(0, d, 2) / d))
    cos, sin = angles.cos(), angles.sin()
    targets, up = torch.randint(V, (B * T,)), torch.randn(B, T, 4 * D)

    def plain_attention(qkv):
        q, k, v = qkv.view(B, T, 3, H, d).unbind(2)
        q, k = elementwise.rope(q, cos, sin), elementwise.rope(k, cos, sin)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return out.transpose(1, 2).reshape(B, T, D)

    def plain_swiglu(gate_up):
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    return {
        "rms_norm": (
            lambda x, w: elementwise.norm(x, w, None, 1e-5),
            lambda x, w: F.rms_norm(x, (D,), w, 1e-5),
            [torch.randn(B, T, D), torch.ones(D)],
        ),
        "sum + layer_norm": (
            lambda x, r, w, b: elementwise.add_norm(x, r, w, b, 1e-5)[1],
            lambda x, r, w, b: F.layer_norm(x + r, (D,), w, b, 1e-5),
            [torch.randn(B, T, D), torch.randn(B, T, D), torch.ones(D), torch.zeros(D)],
        ),
        "gelu, tanh": (lambda x: elementwise.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh"), [up]),
        "gelu, exact": (lambda x: elementwise.gelu(x, "none"), F.gelu, [up]),
        "swiglu": (elementwise.swiglu, plain_swiglu, [torch.randn(B, T, 2 * FFN)]),
        "rope + attention": (
            lambda x: qkv_attention(x, H, H, cos, sin, True),
            plain_attention,
            [torch.randn(B, T, 3 * D)],
        ),
        "linear + cross-entropy": (
            lambda x, w: linear_cross_entropy(x, w, targets),
            lambda x, w: F.cross_entropy((x @ w.t()).float(), targets),
            [torch.randn(B * T, D), torch.randn(V, D) / 20],
        ),
    }


def compare(
    fused: Callable, plain: Callable, inputs: list[torch.Tensor], repeat: int = 40
) -> tuple[float, float]:
    """Median seconds of forward and backward of each."""
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(repeat + 5):
        for function, found in zip((fused, plain), times, strict=True):
            for x in inputs:
                x.grad = None
            began = time.perf_counter()
            out = function()
            out.backward(torch.ones_like(out))
            if index >= 5:
                found.append(time.perf_counter() - began)
    return median(times[0]), median(times[1])


if __name__ == "__main__":
    main()
