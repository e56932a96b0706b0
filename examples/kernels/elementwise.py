"""Elementwise kernels: reads of neighbours and of numbers far apart, and a condition without a branch.

python examples/kernels/elementwise.py
"""
# pyright: reportIndexIssue=false

import lab  # first: it chooses between interpreter and GPU
import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

BLOCK = 1024  # elements of a program


@triton.jit
def add(x, y, out, n, stride, BLOCK: tl.constexpr):
    """out[i] = x[i * stride] + y[i * stride]. A program has BLOCK elements; the last one masks those beyond n."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    left = tl.load(x + at * stride, mask=inside)
    right = tl.load(y + at * stride, mask=inside)
    tl.store(out + at, left + right, mask=inside)


@triton.jit
def elu(x, out, n, BLOCK: tl.constexpr):
    """x where it is positive, else exp(x) - 1. Both sides are computed for all elements."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    tl.store(out + at, tl.where(value > 0, value, tl.exp(value) - 1), mask=at < n)


def run_add(x: Tensor, y: Tensor, stride: int = 1) -> Tensor:
    """The sum of every stride-th element of two flat tensors of the same length."""
    n = (x.numel() + stride - 1) // stride
    out = torch.empty(n, dtype=x.dtype, device=x.device)
    add[(triton.cdiv(n, BLOCK),)](x, y, out, n, stride, BLOCK)
    return out


def run_elu(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    elu[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), BLOCK)
    return out


def main() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 5000, device=lab.DEVICE)
    for stride in (1, 8):
        same = torch.equal(run_add(x, y, stride), x[::stride] + y[::stride])
        print(f"add, every {stride}. element: equals PyTorch's: {same}")
    print(f"elu: equals PyTorch's to 1e-6: {lab.farthest(run_elu(x), torch.nn.functional.elu(x)) < 1e-6}")


if __name__ == "__main__":
    main()
