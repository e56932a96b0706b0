"""Puts the heads of latent attention together from the parts that its projections give (arXiv 2405.04434, section 2.1).

Legend: B batch, T tokens, H heads, d width of a query or key head, r of its rotated part, v of a value head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def latent_heads(
    q_BTHd: Tensor,
    kv_BTHn: Tensor,
    key_BTr: Tensor,
    cos: Tensor,
    sin: Tensor,
    value_width: int,
    scale: float = 1.0,
) -> Tensor:
    """Queries, keys and values for `qkv_attention`, (B, T, 3 H d): all query heads, then key heads, then value heads.

    q: the last r features of a head are rotated. kv: of each head d - r features of its key, then its value. key: the
    part of the key that is rotated, the same for all heads. cos, sin (T, r/2) fp32: features 2i and 2i + 1 rotate
    together; they come out as features i and i + r/2 of their part. scale: factor on the queries. Values are padded
    with zeros to width d.

    Plain PyTorch would copy the heads several times, to rotate, repeat, pad and concatenate them. Here each part is
    written once, to its place. The operations are PyTorch's, on any device.
    """
    return _LatentHeads.apply(q_BTHd, kv_BTHn, key_BTr, cos, sin, value_width, scale)


class _LatentHeads(Function):
    """One copy in forward, and one in backward. The gradient of the shared part is summed over the heads in fp32."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, key: Tensor, cos: Tensor, sin: Tensor, value_width: int, scale: float
    ) -> Tensor:
        B, T, H, d = q.shape
        plain = d - key.shape[-1]
        assert kv.shape == (B, T, H, plain + value_width)
        assert value_width <= d
        out = q.new_empty(B, T, 3, H, d)
        torch.mul(q[..., :plain], scale, out=out[:, :, 0, :, :plain])
        out[:, :, 0, :, plain:] = _rotated(q[..., plain:], cos[:, None] * scale, sin[:, None] * scale)
        out[:, :, 1, :, :plain] = kv[..., :plain]
        out[:, :, 1, :, plain:] = _rotated(key, cos, sin)[:, :, None]
        out[:, :, 2, :, :value_width] = kv[..., plain:]
        out[:, :, 2, :, value_width:] = 0
        ctx.save_for_backward(cos, sin)
        ctx.widths, ctx.heads, ctx.scale = (plain, value_width), H, scale
        return out.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        (cos, sin), (plain, value_width), scale = ctx.saved_tensors, ctx.widths, ctx.scale
        dq_BTHd, dk_BTHd, dv_BTHd = grads[0].unflatten(-1, (3, ctx.heads, -1)).unbind(2)
        dq = dq_BTHd.new_empty(dq_BTHd.shape)
        torch.mul(dq_BTHd[..., :plain], scale, out=dq[..., :plain])
        dq[..., plain:] = _rotated_back(dq_BTHd[..., plain:], cos[:, None] * scale, sin[:, None] * scale)
        dkv = torch.cat((dk_BTHd[..., :plain], dv_BTHd[..., :value_width]), dim=-1)
        dkey = _rotated_back(dk_BTHd[..., plain:].sum(2, dtype=torch.float32), cos, sin)
        return dq, dkv, dkey.to(dq.dtype), None, None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (2i, 2i + 1) of the last dim, rotated, as (i, i + r/2); in fp32."""
    a, b = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _rotated_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of `_rotated`."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.stack((a * cos + b * sin, b * cos - a * sin), dim=-1).flatten(-2)
