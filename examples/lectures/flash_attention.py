"""Flash attention by hand (arXiv 2205.14135, 2307.08691): attention by tiles, whose scores never exist as a whole.

A tile of queries goes over the tiles of keys. Its softmax is not known before the last one, so it keeps the largest
score m and the sum l up to now, and rescales what it has whenever m grows. Backward computes the scores of a tile again
from the log-sum-exp, one number for each query. Plain PyTorch shows the arithmetic; a GPU's kernel keeps the tiles in
fast memory.

python examples/lectures/flash_attention.py
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, grad

B, H, T, HEAD, TILE = 2, 4, 128, 16, 32  # sequences, heads, tokens, size of a head, tokens of a tile


def tile_scores(q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
    """Scores of the tile of queries i and of keys j: (B, H, Q, K), -inf where the key comes later."""
    s = q[:, :, i : i + TILE] @ k[:, :, j : j + TILE].mT / math.sqrt(q.shape[-1])
    later = torch.arange(j, j + s.shape[3])[None, :] > torch.arange(i, i + s.shape[2])[:, None]
    return s.masked_fill(later, -torch.inf)


def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
    """The output (B, H, T, d), the log-sum-exp of each query's scores (B, H, T, 1), and the number of tiles."""
    out, lse, tiles = torch.empty_like(q), torch.empty_like(q[..., :1]), 0
    for i in range(0, q.shape[2], TILE):
        rows = slice(i, i + TILE)
        m = torch.full_like(q[:, :, rows, :1], -torch.inf)
        total, o = torch.zeros_like(m), torch.zeros_like(q[:, :, rows])
        for j in range(0, i + TILE, TILE):  # tiles of later keys are skipped
            s = tile_scores(q, k, i, j)
            larger = torch.maximum(m, s.amax(-1, keepdim=True))
            p, shrink = (s - larger).exp(), (m - larger).exp()
            total = total * shrink + p.sum(-1, keepdim=True)
            o = o * shrink + p @ v[:, :, j : j + TILE]
            m, tiles = larger, tiles + 1
        out[:, :, rows], lse[:, :, rows] = o / total, m + total.log()
    return out, lse, tiles


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. The softmax's backward needs, of a whole row, only the sum of dout times out."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (dout * out).sum(-1, keepdim=True)
    for i in range(0, q.shape[2], TILE):
        rows = slice(i, i + TILE)
        for j in range(0, i + TILE, TILE):
            keys = slice(j, j + TILE)
            p = (tile_scores(q, k, i, j) - lse[:, :, rows]).exp()
            dp = dout[:, :, rows] @ v[:, :, keys].mT
            ds = p * (dp - delta[:, :, rows]) / math.sqrt(q.shape[-1])
            dq[:, :, rows] += ds @ k[:, :, keys]
            dk[:, :, keys] += ds.mT @ q[:, :, rows]
            dv[:, :, keys] += p.mT @ dout[:, :, rows]
    return dq, dk, dv


class FlashAttention(Function):
    """q, k, v (B, H, T, d) -> (B, H, T, d). Causal."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse, _ = forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        return backward(q, k, v, out, lse, grads[0])


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same with all scores at once."""
    s = q @ k.mT / math.sqrt(q.shape[-1])
    later = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
    return s.masked_fill(later, -torch.inf).softmax(-1) @ v


def main() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, H, T, HEAD, dtype=torch.float64, requires_grad=True) for _ in range(3))
    dout = torch.randn(B, H, T, HEAD, dtype=torch.float64)
    results = [(out, *grad(out, (q, k, v), dout)) for out in (FlashAttention.apply(q, k, v), plain(q, k, v))]
    apart = max((a - b).abs().max().item() for a, b in zip(*results, strict=True))
    tiles, per_side = forward(q, k, v)[2], T // TILE
    print(f"{T} tokens in tiles of {TILE}: {tiles} of {per_side**2} tiles, the others are masked")
    print(f"scores at once, per head: {TILE * TILE} by tiles, {T * T} without")
    print(f"kept for backward beside q, k, v and output, per head: {T} numbers, without tiles {T * T}")
    with torch.no_grad():
        largest = (q * 100 @ (k * 100).mT).max() / math.sqrt(HEAD)
        finite = bool(forward(q * 100, k * 100, v)[0].isfinite().all())
    print(f"a score of {largest:.0f} overflows no exponential: {finite}")
    print(f"output and gradients equal plain attention to 1e-12: {apart < 1e-12}")


if __name__ == "__main__":
    main()
