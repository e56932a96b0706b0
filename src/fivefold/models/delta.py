"""Linear attention by the gated delta rule (Gated DeltaNet, arXiv 2412.06464, as in Qwen3-Next): a short causal
convolution of queries, keys and values, the rule (kernels/delta_rule.py), a norm of each head's output and a gate.

Shapes: B batch, T tokens, D model width, K key heads, H value heads, d width of a key head, e of a value head, W tokens
of the convolution, F = 2 K d + H e features that it mixes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fivefold.kernels.blockwise_attention import Documents
from fivefold.kernels.delta_rule import causal_convolution, gated_delta_rule
from fivefold.kernels.elementwise import gated
from fivefold.models.delta_work import widths_of
from fivefold.models.layers import Core, Linear, RMSNorm, StateCache, Sublayer
from fivefold.models.section import ModelSection, known


class DeltaWeights(NamedTuple):
    """What a core computes by: filters of the convolution, and of each head the decay's factor and offset."""

    conv_FW: Tensor
    a_log_H: Tensor
    dt_H: Tensor


class DeltaCore(Core):
    """Convolution and rule: (B, T, F + 2H) -> (B, T, H e). Features: queries, keys, values, logits of beta, steps of
    the decay. `kv_heads` are those of queries and keys. Backward computes both again: what they keep is several times
    as large as what they read."""

    def __init__(self, heads: int, key_heads: int, key: int, value: int) -> None:
        super().__init__(heads, key_heads)
        self.key, self.value = key, value

    @property
    def sections(self) -> list[int]:
        """Features of each part, of this rank's heads."""
        keys = self.kv_heads * self.key
        return [keys, keys, self.heads * self.value, self.heads, self.heads]

    def forward(
        self,
        mixed: Tensor,
        by: DeltaWeights,
        documents: Documents | None = None,
        cache: StateCache | None = None,
    ) -> Tensor:
        first = None if documents is None else documents.first
        if cache is not None:
            state, tail = cache.before
            out, state = self.compute(mixed, by, first, state, tail)
            inputs, width = mixed[..., : len(by.conv_FW)], by.conv_FW.shape[1] - 1
            kept = inputs if tail is None else torch.cat((tail, inputs), 1)
            cache.put(mixed.shape[1], state, F.pad(kept, (0, 0, width, 0))[:, -width:].clone())
        elif torch.is_grad_enabled():
            out, _ = checkpoint(self.compute, mixed, by, first, use_reentrant=False, preserve_rng_state=False)
        else:
            out, _ = self.compute(mixed, by, first)
        return out

    def compute(
        self,
        mixed: Tensor,
        by: DeltaWeights,
        first_BT: Tensor | None,
        state: Tensor | None = None,
        tail: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The outputs in the dtype of the inputs, and the state behind them. As in `gated_delta_rule`."""
        qkv, beta, steps = mixed.split([len(by.conv_FW), self.heads, self.heads], -1)
        qkv = F.silu(causal_convolution(qkv, by.conv_FW, tail, first_BT))
        q, k, v = qkv.split(self.sections[:3], -1)
        q, k = (x.unflatten(-1, (self.kv_heads, -1)) for x in (q, k))
        decay = -by.a_log_H.float().exp() * F.softplus(steps.float() + by.dt_H.float())
        v, beta = v.unflatten(-1, (self.heads, -1)), beta.float().sigmoid()
        out, state = gated_delta_rule(q, k, v, decay, beta, state, first_BT)
        return out.flatten(2).to(mixed.dtype), state


class DeltaAttention(Sublayer):
    """Linear attention in the place of attention. Rows of `in_proj.weight`: `Widths.sections`. It needs no positions:
    the convolution and the decay tell the order of tokens."""

    entry = "in_proj"

    def __init__(self, model: ModelSection, bias: bool, number: int = 0) -> None:
        super().__init__()
        w, D = widths_of(model), model.dim
        self.conv_vectors = nn.Parameter(torch.empty(w.mixed, w.conv))
        self.a_log, self.dt = nn.Parameter(torch.empty(w.heads)), nn.Parameter(torch.empty(w.heads))
        self.in_proj = Linear(D, sum(w.sections), bias=False)
        self.core = DeltaCore(w.heads, w.key_heads, w.key, w.value)
        self.norm = RMSNorm(w.value, known(model.norm_eps))
        self.out = Linear(w.heads * w.value, D, bias=False)

    def forward(self, x_BTD: Tensor, *tables: Tensor, **options: Any) -> Tensor:
        return self.finish(self.in_proj(x_BTD), *tables, **options)

    def finish(self, product: Tensor, *tables: Tensor, **options: Any) -> Tensor:
        """The first matmul's result -> (B, T, D). options: of the core."""
        H, e = len(self.a_log), self.core.value  # of this tensor-parallel rank
        mixed, gates = product.split([product.shape[-1] - H * e, H * e], -1)
        out = self.core(mixed, DeltaWeights(self.conv_vectors, self.a_log, self.dt), **options)
        normed = self.norm(out.unflatten(-1, (H, e))).flatten(-2)
        return self.out(gated(normed, gates, silu=True))
