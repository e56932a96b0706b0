"""Kernels with a program per row: softmax and RMSNorm. A row is read once and written once; sums and maxima of it stay
in the block's registers and shared memory.

python examples/kernels/rows.py
"""
# pyright: reportIndexIssue=false

import lab  # first: it chooses between interpreter and GPU
import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

EPS = 1e-5


@triton.jit
def softmax(x, out, columns, BLOCK: tl.constexpr):
    """A row of x (rows, columns) per program. BLOCK: a power of two from `columns` on; -inf is beyond."""
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0) * columns
    value = tl.load(x + row + at, mask=at < columns, other=-float("inf")).to(tl.float32)
    e = tl.exp(value - tl.max(value, 0))
    tl.store(out + row + at, e / tl.sum(e, 0), mask=at < columns)


@triton.jit
def rmsnorm(x, weight, out, columns, eps, BLOCK: tl.constexpr):
    """A row of x per program: x / sqrt(mean(x^2) + eps) * weight, computed in fp32."""
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0) * columns
    value = tl.load(x + row + at, mask=at < columns, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(value * value, 0) / columns + eps)
    gain = tl.load(weight + at, mask=at < columns).to(tl.float32)
    tl.store(out + row + at, value * scale * gain, mask=at < columns)


def run_softmax(x: Tensor) -> Tensor:
    """Of each row of a contiguous (rows, columns)."""
    out = torch.empty_like(x)
    softmax[(x.shape[0],)](x, out, x.shape[1], triton.next_power_of_2(x.shape[1]))
    return out


def run_rmsnorm(x: Tensor, weight: Tensor) -> Tensor:
    """Of each row of a contiguous (rows, columns); weight (columns,)."""
    out = torch.empty_like(x)
    rmsnorm[(x.shape[0],)](x, weight, out, x.shape[1], EPS, triton.next_power_of_2(x.shape[1]))
    return out


def main() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(64, 600, device=lab.DEVICE), torch.randn(600, device=lab.DEVICE)
    for dtype, most in ((torch.float32, 1e-6), (torch.float16, 1e-3)):
        a, w = x.to(dtype), weight.to(dtype)
        apart = {
            "softmax": lab.farthest(run_softmax(a), a.softmax(-1)),
            "rmsnorm": lab.farthest(run_rmsnorm(a, w), torch.nn.functional.rms_norm(a, (600,), w, EPS)),
        }
        for name, far in apart.items():
            print(f"{name} in {str(dtype)[6:]}: equals PyTorch's to {most:g}: {far < most}")
    if lab.INTERPRETED:
        for name, run in {"softmax": run_softmax, "rmsnorm": lambda x: run_rmsnorm(x, weight)}.items():
            with lab.Moved() as moved:
                run(x)
            print(f"{name} of {x.nbytes:,} bytes: {moved.read:,} read, {moved.written:,} written")


if __name__ == "__main__":
    main()
