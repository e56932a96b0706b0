"""Attention over one block of keys. It also returns the log-sum-exp of the scores (lse), so that blocks can be merged.

`merge` weighs two results over different keys by their shares of the sum. Backward also goes block by block. It
recomputes the probabilities from the lse over all keys (FlashAttention, arXiv 2205.14135).

On NVIDIA GPUs in bf16 and fp16: PyTorch's flash kernels. Elsewhere: matmuls by blocks of queries, as in
`blockwise_attention.py`.

Legend: B batch, H query heads, K key-value heads, G = H/K, d head size, T tokens of qkv, Q queries, q of them in a
block, S keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.kernels import native
from fivefold.kernels.blockwise_attention import _flat, _heads_first, _heads_last
from fivefold.kernels.elementwise import rope
from fivefold.kernels.private import flash_attention, flash_attention_backward
from fivefold.kernels.sizes import query_blocks
from fivefold.kernels.wide import wide


class Queries(NamedTuple):
    """Tensors of queries for backward over any keys. q, dout, out: the queries, the gradient of their output, and their
    output over all keys, each (B, H, Q, d). lse: over all keys. delta: sum(dout * out). Both (B, H, Q) in fp32."""

    q: Tensor
    dout: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor

    def late(self, count: int) -> Queries:
        """The last `count` queries."""
        return Queries(*(x[:, :, -count:].contiguous() for x in self))


def split_heads(
    qkv: Tensor, heads: int, kv_heads: int, cos: Tensor | None = None, sin: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Splits qkv (B, T, (H + 2K) d) into queries (B, H, T, d) and keys and values (2, B, K, T, d), both contiguous.
    Queries and keys are rotated if cos, sin (T, d/2) are given."""
    B, T, width = qkv.shape
    d = width // (heads + 2 * kv_heads)
    if native.usable(qkv):
        qkv = qkv.contiguous()
        q = _heads_first(qkv, 0, heads, d, 0, T, cos, sin)
        k = _heads_first(qkv, heads, kv_heads, d, 0, T, cos, sin)
        return q, torch.stack((k, _heads_first(qkv, heads + kv_heads, kv_heads, d, 0, T)))
    q, k, v = qkv.view(B, T, -1, d).split([heads, kv_heads, kv_heads], dim=2)
    if cos is not None and sin is not None:
        q, k = rope(q, cos, sin), rope(k, cos, sin)
    return q.transpose(1, 2).contiguous(), torch.stack((k.transpose(1, 2), v.transpose(1, 2)))


def split_heads_backward(
    dq: Tensor, dkv: Tensor, cos: Tensor | None = None, sin: Tensor | None = None
) -> Tensor:
    """The gradient of qkv (B, T, (H + 2K) d) from the gradients of queries and of keys and values."""
    B, H, T, d = dq.shape
    K = dkv.shape[2]
    if native.usable(dq, dkv):
        dqkv = dq.new_empty(B, T, (H + 2 * K) * d)
        _heads_last(dq, dqkv, 0, 0, cos, sin)
        _heads_last(dkv[0], dqkv, H, 0, cos, sin)
        _heads_last(dkv[1], dqkv, H + K, 0)
        return dqkv
    parts = [x.transpose(1, 2) for x in (dq, dkv[0], dkv[1])]
    if cos is not None and sin is not None:  # rotated back by the opposite angles
        parts[:2] = [rope(x, cos, -sin) for x in parts[:2]]
    return torch.cat(parts, dim=2).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of q (B, H, Q, d) to k, v (B, K, S, d). Returns output (B, H, Q, d) in q's dtype, lse (B, H, Q) fp32.

    Causal: query i sees keys 0..i, and Q = S. q is contiguous; k and v may be cut in S from longer ones.
    """
    assert not causal or q.shape[2] == k.shape[2]
    if _has_flash(q):
        return _flash(q, k, v, causal)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    k, v = wide(k), wide(v)
    for start, end, seen in _ranges(q.shape[2], k.shape[2], causal, q.element_size()):
        block, keys, values = slice(start, end), _flat(k[:, :, :seen]), _flat(v[:, :, :seen])
        p = torch.bmm(wide(_rows(q[:, :, block], k.shape[1])), keys.transpose(1, 2))  # (B K, G q, S)
        lse[:, :, block] = _softmax(p, end - start, start, causal, q.shape[3]).view(lse[:, :, block].shape)
        out[:, :, block] = torch.bmm(p, values).view(out[:, :, block].shape)
    return out, lse


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merges another result, of the same queries over other keys, into out (B, H, Q, d) and lse (B, H, Q), both
    fp32."""
    share = torch.sigmoid(part_lse - lse)  # of the sum over both
    out.lerp_(part.to(out.dtype), share[..., None])
    torch.logaddexp(lse, part_lse, out=lse)


def queries(q: Tensor, dout: Tensor, out: Tensor, lse: Tensor) -> Queries:
    """The `Queries` of a backward pass. out: in the dtype that forward returned."""
    return Queries(q, dout, out, lse, (dout.float() * out).sum(-1))


def attend_backward(rows: Queries, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients over these keys: of q (B, H, Q, d), and of k and v (B, K, S, d). The last two are fp32 if they are sums
    of many blocks."""
    if _has_flash(rows.q):
        return _flash_backward(rows, k, v, causal)
    (B, K, S, d), dq = k.shape, torch.empty_like(rows.q)
    blocks = _ranges(rows.q.shape[2], S, causal, k.element_size())
    dtype = k.dtype if len(blocks) <= 2 else torch.float32
    k, v, dk, dv = wide(k), wide(v), None, None
    for start, end, seen in reversed(blocks):  # the last block sees every key, so its matmuls start the sums
        part, keys = Queries(*(x[:, :, start:end] for x in rows)), _flat(k[:, :, :seen])
        q_rows, do_rows = wide(_rows(part.q, K)), wide(_rows(part.dout, K))  # (B K, G q, d)
        p = torch.bmm(q_rows, keys.transpose(1, 2))
        ds = torch.bmm(do_rows, _flat(v[:, :, :seen]).transpose(1, 2))
        _softmax_backward(p, ds, part, start, causal)
        dq[:, :, start:end] = torch.bmm(ds, keys).view(part.q.shape)
        dk_block = torch.bmm(ds.transpose(1, 2), q_rows).view(B, K, seen, d)
        dv_block = torch.bmm(p.transpose(1, 2), do_rows).view(B, K, seen, d)
        if dk is None or dv is None:
            dk, dv = dk_block.to(dtype), dv_block.to(dtype)
        else:
            dk[:, :, :seen] += dk_block
            dv[:, :, :seen] += dv_block
    assert dk is not None
    assert dv is not None
    return dq, dk, dv


def _ranges(Q: int, S: int, causal: bool, element_size: int) -> list[tuple[int, int, int]]:
    """(start, end, keys seen) of each block of queries."""
    return [(start, end, seen if causal else S) for start, end, seen in query_blocks(Q, causal, element_size)]


def _rows(x_BHqd: Tensor, kv_heads: int) -> Tensor:
    """Stacks the query heads that share a key-value head: (B K, G q, d)."""
    B, H, q, d = x_BHqd.shape
    return x_BHqd.reshape(B * kv_heads, H // kv_heads * q, d)


def _softmax(scores: Tensor, queries: int, start: int, causal: bool, d: int) -> Tensor:
    """Turns scores (B K, G q, S) of a block of queries, the first at position `start`, into probabilities in place.
    Returns lse (B K, G q)."""
    if native.usable(scores):
        lse = torch.empty(scores.shape[:2])
        sizes = (lse.numel() // queries, queries, scores.shape[2])
        native.call("softmax_forward", scores.dtype, scores, lse, *sizes, start, int(causal), float(d**-0.5))
        return lse
    exponents = _masked(scores.float() * d**-0.5, queries, start, causal)
    lse = exponents.logsumexp(-1)
    scores.copy_((exponents - lse[..., None]).exp_())
    return lse


def _softmax_backward(scores: Tensor, dp: Tensor, rows: Queries, start: int, causal: bool) -> None:
    """Turns scores (B K, G q, S) into probabilities, and their gradient dp into that of the scores, in place."""
    count, d = rows.q.shape[2:]
    lse, delta = rows.lse.contiguous(), rows.delta.contiguous()
    if native.usable(scores, dp):
        sizes = (lse.numel() // count, count, scores.shape[2])
        native.call(
            "softmax_lse_backward", dp.dtype, scores, dp, lse, delta, *sizes, start, int(causal), float(d**-0.5)
        )  # fmt: skip
        return
    lse, delta = (x.view(scores.shape[0], -1, 1) for x in (lse, delta))
    p = (_masked(scores.float() * d**-0.5, count, start, causal) - lse).exp_()
    dp.copy_(p * (dp.float() - delta) * d**-0.5)
    scores.copy_(p)


def _masked(scores: Tensor, queries: int, start: int, causal: bool) -> Tensor:
    """Sets scores to -inf where a query does not see a key."""
    if not causal:
        return scores
    seen = torch.ones(queries, scores.shape[2], dtype=torch.bool, device=scores.device).tril(start)
    by_query = scores.view(-1, queries, scores.shape[2])
    return by_query.masked_fill(~seen, -torch.inf).view_as(scores)


def _has_flash(q: Tensor) -> bool:
    """True if flash kernels take q. "meta" stands for a GPU: tests call the kernels there, for shapes."""
    return q.device.type in ("cuda", "meta") and q.dtype in (torch.bfloat16, torch.float16)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    k, v = (_repeated(x, q.shape[1]) for x in (k, v))
    return flash_attention(q, k, v, causal)


def _flash_backward(rows: Queries, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    (B, K, S, d), H = k.shape, rows.q.shape[1]
    k, v = (_repeated(x, H) for x in (k, v))
    dq, dk, dv = flash_attention_backward(rows.dout, rows.q, k, v, rows.out, rows.lse, causal)
    return dq, dk.view(B, K, -1, S, d).sum(2), dv.view(B, K, -1, S, d).sum(2)


def _repeated(x_BKSd: Tensor, heads: int) -> Tensor:
    """Repeats key-value heads, one for each query head: (B, H, S, d)."""
    return x_BKSd.repeat_interleave(heads // x_BKSd.shape[1], dim=1)
