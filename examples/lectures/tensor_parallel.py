"""Tensor parallelism of an MLP by hand, forward and backward: batch 1, sequence 5, hidden 4, 2 ranks.

Y = gelu(X A), Z = Y B. Rank r has the columns A_r and the rows B_r, so Z = Y_0 B_0 + Y_1 B_1 (arXiv 1909.08053).
torchrun --nproc-per-node 2 examples/lectures/tensor_parallel.py
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function, grad
from torch.nn.functional import gelu

from fivefold.comm import everyone
from fivefold.launch.ranks import join
from fivefold.models.layers import Linear
from fivefold.parallel.autograd import TensorAxis
from fivefold.parallel.tensor import ColumnLinear, RowLinear

B, S, H, F = 1, 5, 4, 16  # batch, sequence, hidden, the MLP's inner width


class Enter(Function):
    """f: the identity. Its backward sums the gradients, each of one rank's columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        dist.all_reduce(dx := grads[0].clone())
        return dx


class Leave(Function):
    """g: the sum of the ranks' partial results. Its backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(total := x.clone())
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def main() -> None:
    torch.manual_seed(0)  # all ranks make the same whole tensors
    x, a, b, dz = torch.randn(B, S, H), torch.randn(H, F) / 2, torch.randn(F, H) / 4, torch.randn(B, S, H)
    with join() as ranks:
        mine = slice(ranks.rank * F // ranks.world, (ranks.rank + 1) * F // ranks.world)
        one = [t.clone().requires_grad_() for t in (x, a, b)]  # on one device
        z = gelu(one[0] @ one[1]) @ one[2]
        dx, da, db = grad(z, one, dz)
        want = "on one device", (z, dx, da[:, mine], db[mine])

        hand = [t.clone().requires_grad_() for t in (x, a[:, mine], b[mine])]
        y = gelu(Enter.apply(hand[0]) @ hand[1])  # (1, 5, 4) (4, 8) -> (1, 5, 8)
        z = Leave.apply(y @ hand[2])  # (1, 5, 8) (8, 4) -> (1, 5, 4): a part, and the sum
        dx, da, db, dy = grad(z, [*hand, y], dz)
        by_hand, shapes = (z, dx, da, db), (tuple(t.shape) for t in (dz, db, dy, da, dx))
        print(f"rank {ranks.rank}: dZ %s dB %s dY %s dA %s dX %s" % tuple(shapes))

        axis = TensorAxis(everyone(ranks), sp=False)
        up, down = Linear(H, F, bias=False), Linear(F, H, bias=False)  # their weights are (out, in)
        up.weight, down.weight = (nn.Parameter(t.T.contiguous()) for t in (a[:, mine], b[mine]))
        ours = x.clone().requires_grad_()
        z = RowLinear(down, axis)(gelu(ColumnLinear(up, axis)(ours)))
        dx, da, db = grad(z, (ours, up.weight, down.weight), dz)
        for how, found in (want, ("by Fivefold", (z, dx, da.T, db.T))):
            apart = max((s - t).abs().max().item() for s, t in zip(by_hand, found, strict=True))
            print(f"rank {ranks.rank}: largest difference of Z, dX, dA, dB, by hand and {how}: {apart:.1e}")


if __name__ == "__main__":
    main()
