"""Rotary positions: each pair of numbers of a head is turned by an angle that grows with the position. Backward turns
back, by the same kernel.

python examples/kernels/rope.py
"""
# pyright: reportIndexIssue=false

from typing import Any

import lab  # first: it chooses between interpreter and GPU
import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.autograd import Function, grad


@triton.jit
def rope(x, cos, sin, out, T, HEADS: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr):
    """x, out (B, T, HEADS, 2 HALF); cos, sin (T, HALF). A program has all heads of a token: the angles are read once
    for all of them. Numbers i and i + HALF of a head are a pair. BACK: turned the other way."""
    token = tl.program_id(0)
    i = tl.arange(0, HALF)[None, :]
    at = token * HEADS * 2 * HALF + tl.arange(0, HEADS)[:, None] * 2 * HALF + i
    c = tl.load(cos + token % T * HALF + i)
    s = tl.load(sin + token % T * HALF + i)
    if BACK:
        s = -s
    a = tl.load(x + at).to(tl.float32)
    b = tl.load(x + at + HALF).to(tl.float32)
    tl.store(out + at, a * c - b * s)
    tl.store(out + at + HALF, b * c + a * s)


def turned(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """x (B, T, heads, head), contiguous; cos, sin (T, head / 2). Heads and head: powers of two."""
    B, T, heads, head = x.shape
    out = torch.empty_like(x)
    rope[(B * T,)](x, cos, sin, out, T, heads, head // 2, back)
    return out


class Rope(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return turned(grads[0].contiguous(), *ctx.saved_tensors, back=True), None, None


def plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same in PyTorch's own operations."""
    a, b = x.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)


def angles(T: int, head: int) -> tuple[Tensor, Tensor]:
    """cos, sin (T, head / 2)."""
    angle = torch.outer(torch.arange(T), 10000 ** -(torch.arange(head // 2) / (head // 2)))
    return angle.cos().to(lab.DEVICE), angle.sin().to(lab.DEVICE)


def main() -> None:
    torch.manual_seed(0)
    B, T, HEADS, HEAD = 2, 24, 4, 16
    x, dout = torch.randn(2, B, T, HEADS, HEAD, device=lab.DEVICE)
    x.requires_grad_()
    cos, sin = angles(T, HEAD)
    results = [(out, *grad(out, x, dout)) for out in (Rope.apply(x, cos, sin), plain(x, cos, sin))]
    far = max(lab.farthest(a, b) for a, b in zip(*results, strict=True))
    print(f"rope: output and gradient equal PyTorch's to 1e-6: {far < 1e-6}")
    back = turned(Rope.apply(x, cos, sin), cos, sin, back=True)
    print(f"rope, then back: the input to 1e-6: {lab.farthest(back, x) < 1e-6}")


if __name__ == "__main__":
    main()
