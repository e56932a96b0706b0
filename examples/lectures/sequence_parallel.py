"""Megatron's sequence parallelism by hand (arXiv 2205.05198), around a feed-forward layer.

y = x + gelu(norm(x) A) B. Each rank has the columns A_r and the rows B_r, and outside of the two matrices a part of the
tokens. So norm and residual stream are cut, too. g gathers the tokens in front of A, and g-bar sums behind B and cuts.
Each is the other's backward: an all-gather and a reduce-scatter, which together send what an all-reduce sends.

torchrun --nproc-per-node 4 examples/lectures/sequence_parallel.py
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function, grad
from torch.nn.functional import gelu, layer_norm

B, T, D, F = 2, 16, 32, 128  # sequences, tokens, width, the layer's inner width
sent = {"all-gather": 0, "reduce-scatter": 0}  # elements, as a ring sends them


def gather(x: Tensor) -> Tensor:
    """Everybody's tokens: (B, t, D) -> (B, T, D)."""
    ranks = dist.get_world_size()
    parts = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(parts, x.contiguous())
    sent["all-gather"] += (ranks - 1) * x.numel()
    return torch.cat(parts, 1)


def scatter(x: Tensor) -> Tensor:
    """The sum of every rank's x, of which each rank gets its tokens: (B, T, D) -> (B, t, D)."""
    ranks = dist.get_world_size()
    parts = [part.contiguous() for part in x.chunk(ranks, 1)]
    dist.reduce_scatter(out := torch.empty_like(parts[0]), parts)
    sent["reduce-scatter"] += (ranks - 1) * out.numel()
    return out


class Gather(Function):
    """g: all-gather. A gathered token has a gradient on each rank, so backward sums them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gather(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return scatter(grads[0])


class Scatter(Function):
    """g-bar: reduce-scatter. Its backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return scatter(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return gather(grads[0])


def one_device(x: Tensor, norm: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x (B, T, D), the norm's weight (D), a (D, F), b (F, D) -> (B, T, D)."""
    return x + gelu(layer_norm(x, (x.shape[-1],), norm) @ a) @ b


def cut(x: Tensor, norm: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """This rank's tokens (B, t, D), columns (D, F / n) and rows (F / n, D) -> its tokens of the result."""
    whole = Gather.apply(layer_norm(x, (x.shape[-1],), norm))
    return x + Scatter.apply(gelu(whole @ a) @ b)


def gradients(x: Tensor, norm: Tensor, a: Tensor, b: Tensor, dy: Tensor) -> list[Tensor]:
    """(y, dx, dnorm, da, db) of this rank's parts. The norm's weight saw this rank's tokens only, so its gradient is
    summed over the ranks: once per step."""
    y = cut(x, norm, a, b)
    dx, dnorm, da, db = grad(y, (x, norm, a, b), dy)
    dist.all_reduce(dnorm)
    return [y, dx, dnorm, da, db]


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # all ranks make the same whole tensors
    x, dy = torch.randn(B, T, D).double(), torch.randn(B, T, D).double()
    norm, a, b = torch.rand(D).double() + 0.5, torch.randn(D, F).double() / 6, torch.randn(F, D).double() / 12
    whole = [t.clone().requires_grad_() for t in (x, norm, a, b)]
    y = one_device(*whole)
    wanted = [y, *grad(y, whole, dy)]

    dims = 1, None, 1, 0  # of tokens, nothing, columns, rows
    piece = [t if d is None else t.chunk(ranks, d)[rank] for t, d in zip((x, norm, a, b), dims, strict=True)]
    piece = [t.detach().clone().requires_grad_() for t in piece]
    found = gradients(*piece, dy.chunk(ranks, 1)[rank])
    wanted = [t if d is None else t.chunk(ranks, d)[rank] for t, d in zip(wanted, (1, *dims), strict=True)]
    apart = torch.tensor([(f - w).abs().max().item() for f, w in zip(found, wanted, strict=True)])
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    if rank == 0:
        all_reduces = 2 * 2 * (ranks - 1) * B * T * D // ranks
        print(f"residual stream and norm on a rank: {tuple(piece[0].shape)} of {tuple(x.shape)}")
        print(f"between the matrices: {(B, T, F // ranks)} of {(B, T, F)}")
        print(
            f"sent, forward and backward: {sent['all-gather']} elements gathered, {sent['reduce-scatter']} scattered"
        )
        print(f"two all-reduces of tensor parallelism send {all_reduces}")
        print(f"output and all gradients equal those of one device to 1e-12: {apart.max().item() < 1e-12}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
