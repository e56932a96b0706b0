"""DeepSeek-V3: multi-head latent attention (arXiv 2405.04434) and a mixture of experts with shared experts, routed
within groups and balanced by a bias (arXiv 2412.19437; see models/mixture.py), with multi-token prediction
(models/ahead.py).

Shapes: B batch, T tokens, D model width, H heads, d width of a query head, r of its rotated part, v of a value head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold.kernels.blockwise_attention import Documents
from fivefold.models.deepseek.card import widths_of
from fivefold.models.layers import (
    AttentionCore,
    LayerCache,
    Linear,
    RegionInput,
    RMSNorm,
    Sublayer,
    cached_attention,
)
from fivefold.models.llama import module as llama
from fivefold.models.moe import module as moe
from fivefold.models.section import ModelSection

EPS = 1e-6
"""Of the latents' norms, whatever the model's `norm_eps` is (as DeepSeek's own code and transformers have it)."""


def latent_heads(
    q_BTHd: Tensor,
    kv_BTHn: Tensor,
    key_BTr: Tensor,
    cos: Tensor,
    sin: Tensor,
    value_width: int,
    scale: float = 1.0,
) -> Tensor:
    """Queries, keys and values for `qkv_attention`, (B, T, 3 H d): all query heads, then key heads, then value heads,
    put together from the parts that the projections of latent attention give (arXiv 2405.04434, section 2.1).

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
        _scale(q[..., :plain], scale, out[:, :, 0, :, :plain])
        out[:, :, 0, :, plain:] = _rotated(q[..., plain:], cos[:, None] * scale, sin[:, None] * scale)
        out[:, :, 1, :, :plain] = kv[..., :plain]
        out[:, :, 1, :, plain:] = _rotated(key, cos, sin)[:, :, None]
        out[:, :, 2, :, :value_width] = kv[..., plain:]
        out[:, :, 2, :, value_width:].zero_()
        ctx.save_for_backward(cos, sin)
        ctx.widths, ctx.heads, ctx.scale = (plain, value_width), H, scale
        return out.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        (cos, sin), (plain, value_width), scale = ctx.saved_tensors, ctx.widths, ctx.scale
        dq_BTHd, dk_BTHd, dv_BTHd = grads[0].unflatten(-1, (3, ctx.heads, -1)).unbind(2)
        dq = dq_BTHd.new_empty(dq_BTHd.shape)
        _scale(dq_BTHd[..., :plain], scale, dq[..., :plain])
        dq[..., plain:] = _rotated_back(dq_BTHd[..., plain:], cos[:, None] * scale, sin[:, None] * scale)
        dkv = torch.cat((dk_BTHd[..., :plain], dv_BTHd[..., :value_width]), dim=-1)
        dkey = _rotated_back(dk_BTHd[..., plain:].sum(2, dtype=torch.float32), cos, sin)
        return dq, dkv, dkey.to(dq.dtype), None, None, None, None


def _scale(x: Tensor, factor: float, into: Tensor) -> None:
    """Writes x times a factor in one pass. PyTorch's compiler cannot trace the plain way, and joins these two."""
    if torch.compiler.is_compiling():
        into.copy_(x * factor)
    else:
        torch.mul(x, factor, out=into)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (2i, 2i + 1) of the last dim, rotated, as (i, i + r/2); in fp32."""
    a, b = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _rotated_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of `_rotated`."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.stack((a * cos + b * sin, b * cos - a * sin), dim=-1).flatten(-2)


class LatentAttention(Sublayer):
    """Attention whose queries, keys and values are made from two narrow vectors of each token.

    A head's query and key have a part without positions and a part that is rotated. All heads share that of the key.
    The core gets value heads that are padded to the width of the others, so that it is the same for all architectures.
    The cache of generation holds these heads, not the latent vectors. YaRN's factor on the scores, which are those of
    both parts, is on the queries.
    """

    def __init__(self, model: ModelSection, bias: bool, number: int = 0) -> None:
        super().__init__()
        assert not bias, "refused by the card"
        H, w = model.heads, widths_of(model)
        self.sections, self.value = (w.query_rank, w.kv_rank, w.rope), w.value
        self.scale = model.rope_amplitude**2
        self.latents = Linear(model.dim, w.latents, bias=False)
        self.norm_q = RMSNorm(w.query_rank, EPS) if w.query_rank else None
        self.norm_kv = RMSNorm(w.kv_rank, EPS)
        self.up_q = Linear(w.query_rank or model.dim, H * w.query, bias=False)
        self.up_kv = Linear(w.kv_rank, H * w.key_value, bias=False)
        self.shared_key = RegionInput()
        self.core = AttentionCore(H, H)
        self.out = Linear(H * w.value, model.dim, bias=False)

    def forward(
        self, x_BTD: Tensor, *tables: Tensor, cache: LayerCache | None = None, **options: Any
    ) -> Tensor:
        """tables: cosine and sine of the rotary angles (T, rope_dim / 2)."""
        latents = self.latents(x_BTD)
        if cache is None:
            return self.finish(latents, x_BTD, *tables, **options)
        H, qkv = self.core.heads, self.prepare(latents, x_BTD, *tables)
        return self.project(cached_attention(qkv, H, H, None, None, cache))

    def finish(self, product: Tensor, *tables: Tensor, documents: Documents | None = None) -> Tensor:
        """Latent vectors of queries and of keys and values, and the shared part of the key; the sublayer's input, and
        the tables -> (B, T, D)."""
        return self.project(self.core(self.prepare(product, *tables), documents=documents))

    def prepare(self, latents: Tensor, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries, keys and values of all heads, rotated: (B, T, 3 H d)."""
        query, key_value, key = latents.split(self.sections, dim=-1)
        heads = self.core.heads, -1
        q_BTHd = self.up_q(x_BTD if self.norm_q is None else self.norm_q(query)).unflatten(-1, heads)
        kv_BTHn = self.up_kv(self.norm_kv(key_value)).unflatten(-1, heads)
        return latent_heads(q_BTHd, kv_BTHn, self.shared_key(key), cos, sin, self.value, self.scale)

    def project(self, attended: Tensor) -> Tensor:
        """(B, T, H d) -> (B, T, D), without the padding of the values."""
        return self.out(attended.unflatten(-1, (self.core.heads, -1))[..., : self.value].flatten(-2))


class Block(llama.Block):
    attention_type = LatentAttention


class Model(moe.Model):
    """A model with `LatentAttention`, whose first `dense_layers` have no experts."""

    block_type = Block
    amplitude = 1.0  # it is in `LatentAttention.scale`
