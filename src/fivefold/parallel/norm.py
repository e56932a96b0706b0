"""RMSNorms over features that tensor parallelism cuts, such as those of all heads.

Each rank has the same share of every vector. The sums over all features, one number per vector, are those of the ranks:
in forward of the squares, in backward of the products of gradient and vector.

    y = x r w,  r = (sum(x^2) / F + eps)^(-1/2)
    dx = r (dy w - x r^2 sum(dy w x) / F)

Legend: F features of a whole vector.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold.comm import Axis
from fivefold.models.layers import WideRMSNorm
from fivefold.spread.regions import SQUARES


class CutRMSNorm(nn.Module):
    """`WideRMSNorm` with this rank's features of each vector, and their weights."""

    def __init__(self, norm: WideRMSNorm, axis: Axis):
        super().__init__()
        self.weight, self.eps, self.axis = norm.weight, norm.eps, axis

    def forward(self, *vectors: Tensor) -> tuple[Tensor, ...]:
        return _CutRMSNorm.apply(self.weight, self.eps, self.axis, *vectors)


class _CutRMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, eps: float, axis: Axis, *vectors: Tensor):
        vectors = tuple(x.contiguous() for x in vectors)
        norms = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32) for x in vectors]
        squares = axis.run(SQUARES, torch.stack(norms).square_()).unbind()
        rs = [
            torch.rsqrt(square / (axis.size * x.shape[-1]) + eps)[..., None]
            for square, x in zip(squares, vectors, strict=True)
        ]
        ctx.save_for_backward(weight, *rs, *vectors)
        ctx.axis = axis
        each = zip(vectors, rs, _weights(weight, vectors), strict=True)
        return tuple((x * r).mul_(w).to(x.dtype) for x, r, w in each)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        weight, *saved = ctx.saved_tensors
        axis, rs, vectors = ctx.axis, saved[: len(grads)], saved[len(grads) :]
        weights, products, dweights = _weights(weight, vectors), [], []
        for dy, x, r, w in zip(grads, vectors, rs, weights, strict=True):
            product = (x * r).mul_(dy)
            dweights.append(product.flatten(0, -2).sum(0))
            products.append(product.mul_(w).sum(-1))  # r sum(dy w x)
        sums = axis.run(SQUARES, torch.stack(products), backward=True).unbind()
        dxs = []
        for dy, x, r, w, total in zip(grads, vectors, rs, weights, sums, strict=True):
            shrunk = x * (r * total[..., None] / (axis.size * x.shape[-1]))
            dxs.append((dy * w).sub_(shrunk).mul_(r).to(x.dtype))
        return torch.cat(dweights).to(weight.dtype), None, None, *dxs


def _weights(weight: Tensor, vectors: Any) -> tuple[Tensor, ...]:
    """The section of each vector, in fp32."""
    return weight.float().split([x.shape[-1] for x in vectors])
