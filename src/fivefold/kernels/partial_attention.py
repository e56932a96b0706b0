"""Attention over one block of keys. It also returns the log-sum-exp of the scores (lse), so that blocks can be merged.

`merge` weighs two results over different keys by their shares of the sum. Backward also goes block by block. It
recomputes the probabilities from the lse over all keys (FlashAttention, arXiv 2205.14135).

On GPUs in bf16 and fp16: PyTorch's flash kernels; for packed documents, on NVIDIA's, those for sequences of any
lengths. Elsewhere: matmuls by blocks of queries, as in `blockwise_attention.py`.

Legend: B batch, H query heads, K key-value heads, G = H/K, d head size, T tokens of qkv, Q queries, q of them in a
block, S keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fivefold.kernels import native
from fivefold.kernels.blockwise_attention import (
    Lengths,
    Shared,
    Tile,
    _flat,
    _heads_first,
    _heads_last,
    _keys,
    _stack,
    has_flash,
    heads_of,
    softmax_shape,
    summed,
    sums_dtype,
    whole_tiles,
)
from fivefold.kernels.elementwise import rope
from fivefold.kernels.matmul import wide

LOWEST = torch.finfo(torch.float32).min


class Queries(NamedTuple):
    """Tensors of queries for backward over any keys. q, dout, out: the queries, the gradient of their output, and their
    output over all keys, each (B, H, Q, d). lse: over all keys. delta: sum(dout * out). Both (B, H, Q) in fp32."""

    q: Tensor
    dout: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor

    def at(self, rows: slice) -> Queries:
        """Some of the queries."""
        return Queries(*(x[:, :, rows].contiguous() for x in self))


def split_heads(
    qkv: Tensor, heads: int, kv_heads: int, cos: Tensor | None = None, sin: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Splits qkv (B, T, (H + 2K) d) into queries (B, H, T, d) and keys and values (2, B, K, T, d), both contiguous.
    Queries and keys are rotated if cos, sin (T, d/2) are given."""
    if native.usable(qkv):
        qkv, T, d = qkv.contiguous(), qkv.shape[1], qkv.shape[2] // (heads + 2 * kv_heads)
        q = _heads_first(qkv, 0, heads, d, 0, T, cos, sin)
        k = _heads_first(qkv, heads, kv_heads, d, 0, T, cos, sin)
        return q, torch.stack((k, _heads_first(qkv, heads + kv_heads, kv_heads, d, 0, T)))
    q, k, v = heads_of(qkv, heads, kv_heads, cos, sin)
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


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, tiles: Shared | None = None, soft_cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Attention of q (B, H, Q, d) to k, v (B, K, S, d). Returns output (B, H, Q, d) in q's dtype, lse (B, H, Q) fp32.

    Causal: query i sees keys 0..i, and Q = S; in a document, the last query sees the last key. q is contiguous; k and v
    may be cut in S from longer ones. tiles: of packed documents (`Documents.shared`). A query that sees none of the
    keys has the output 0 and the lse -inf. soft_cap: see `Scores`; flash attention has none.
    """
    assert tiles is not None or not causal or q.shape[2] == k.shape[2]
    if isinstance(tiles, Lengths) or (tiles is None and not soft_cap and has_flash(q)):
        return flash(q, k, v, causal, tiles)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    if tiles is not None:  # some queries may be in none
        out.zero_()
        lse.fill_(-torch.inf)
    k, v = wide(k), wide(v)
    for tile in tiles if tiles is not None else _tiles(q, k, causal):
        block = tile.rows, slice(None), slice(tile.start, tile.end)
        keys, values = _flat(_keys(k, tile)), _flat(_keys(v, tile))
        p = torch.bmm(wide(_stack(q[block], k.shape[1])), keys.transpose(1, 2))  # (B K, G q, S)
        if soft_cap:
            _cap(p, soft_cap, q.shape[3])
        lse[block] = _softmax(p, tile, q.shape[1], causal, q.shape[3]).view(lse[block].shape)
        out[block] = torch.bmm(p, values).view(out[block].shape)
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


def attend_backward(
    rows: Queries, k: Tensor, v: Tensor, causal: bool, tiles: Shared | None = None, soft_cap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients over these keys: of q (B, H, Q, d), and of k and v (B, K, S, d). The last two are fp32 if they are sums
    of many blocks. tiles, soft_cap: as in `attend`."""
    if isinstance(tiles, Lengths) or (tiles is None and not soft_cap and has_flash(rows.q)):
        return flash_backward(rows, k, v, causal, tiles)
    K, dq = k.shape[1], torch.empty_like(rows.q) if tiles is None else torch.zeros_like(rows.q)
    if tiles is None:
        tiles = _tiles(rows.q, k, causal)
    dtype = sums_dtype(tiles, k.dtype)
    k, v, dk, dv = wide(k), wide(v), None, None
    for tile in reversed(tiles):  # the last one may see every key: its matmuls start the sums
        block = tile.rows, slice(None), slice(tile.start, tile.end)
        part, keys = Queries(*(x[block] for x in rows)), _flat(_keys(k, tile))
        q_rows, do_rows = wide(_stack(part.q, K)), wide(_stack(part.dout, K))  # (B K, G q, d)
        p = torch.bmm(q_rows, keys.transpose(1, 2))
        slope = _cap(p, soft_cap, rows.q.shape[3]) if soft_cap else None
        ds = torch.bmm(do_rows, _flat(_keys(v, tile)).transpose(1, 2))
        # Scores become probabilities, and ds the gradient of the scores, in place.
        heads, d = part.q.shape[1], part.q.shape[3]
        lse, delta = part.lse.contiguous(), part.delta.contiguous()
        if native.usable(p, ds):
            shape = softmax_shape(p, tile, heads, causal, d)
            native.call("softmax_lse_backward", ds.dtype, p, ds, lse, delta, *shape)
        else:
            lse, delta = (x.view(p.shape[0], -1, 1) for x in (lse, delta))
            exact = (_masked(p.float() * d**-0.5, tile, heads, causal) - lse).exp_()
            ds.copy_(exact * (ds.float() - delta) * d**-0.5)
            p.copy_(exact)
            del exact  # before the matmuls
        if slope is not None:
            ds.mul_(slope)
        dq[block] = torch.bmm(ds, keys).view(part.q.shape)
        dk_block = torch.bmm(ds.transpose(1, 2), q_rows)
        dv_block = torch.bmm(p.transpose(1, 2), do_rows)
        dk = summed(dk, dk_block.view(_keys(k, tile).shape), tile, k.shape, dtype)
        dv = summed(dv, dv_block.view(_keys(v, tile).shape), tile, v.shape, dtype)
    if dk is None or dv is None:  # no query sees any key
        return dq, torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
    return dq, dk, dv


def _cap(products: Tensor, soft_cap: float, d: int) -> Tensor:
    """Caps scores, given as products of queries and keys, in place. Returns the derivative, 1 - tanh squared."""
    tanh = (products.float() * (d**-0.5 / soft_cap)).tanh_()
    products.copy_(tanh * (soft_cap * d**0.5))
    return tanh.square_().neg_().add_(1)


def _tiles(q: Tensor, k: Tensor, causal: bool) -> Sequence[Tile]:
    """The tiles of queries that see all keys, or those of a causal mask."""
    Q, S = q.shape[2], k.shape[2]
    tiles = whole_tiles(q.shape[0], Q, causal, q.element_size())
    return tiles if causal else [tile._replace(high=S) for tile in tiles]


def _softmax(scores: Tensor, tile: Tile, heads: int, causal: bool, d: int) -> Tensor:
    """Turns scores (B K, G q, S) of a tile into probabilities in place. Returns lse (B K, G q)."""
    if native.usable(scores):
        lse = torch.empty(scores.shape[:2])
        native.call(
            "softmax_forward", scores.dtype, scores, lse, *softmax_shape(scores, tile, heads, causal, d)
        )
        return lse
    exponents = _masked(scores.float() * d**-0.5, tile, heads, causal)
    lse = exponents.logsumexp(-1)
    shift = lse if tile.bounds is None else lse.clamp(min=LOWEST)  # a row without keys is -inf all along
    scores.copy_((exponents - shift[..., None]).exp_())
    return lse


def _masked(scores: Tensor, tile: Tile, heads: int, causal: bool) -> Tensor:
    """Sets scores to -inf where a query does not see a key."""
    queries, S = tile.end - tile.start, scores.shape[2]
    if tile.bounds is not None:
        keys, (low, high) = torch.arange(S, device=scores.device), tile.bounds.unbind(2)  # (B, q)
        seen = (keys >= low[..., None]) & (keys < high[..., None])  # (B, q, S)
        by_head = scores.view(len(seen), heads, queries, S)
        return by_head.masked_fill(~seen[:, None], -torch.inf).view_as(scores)
    if not causal:
        return scores
    seen = torch.ones(queries, S, dtype=torch.bool, device=scores.device).tril(tile.start)
    by_query = scores.view(-1, queries, S)
    return by_query.masked_fill(~seen, -torch.inf).view_as(scores)


def flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, lengths: Lengths | None = None
) -> tuple[Tensor, Tensor]:
    """`attend` by PyTorch's kernel, which is not documented. The documented functions for whole sequences return no
    log-sum-exp, and without that blocks cannot be merged."""
    cumulative, B = _sequences(q, k, lengths), q.shape[0]
    tokens = (_tokens(x, lengths) for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *tokens, *cumulative, 0.0, causal, False, **_window(lengths)
    )
    if lengths is not None:  # lse (H, B Q); the kernel writes inf where a query sees no key
        lse = lse.unflatten(1, (B, -1)).transpose(0, 1).contiguous()
        lse = lse.masked_fill_(lse == torch.inf, -torch.inf)
    return _heads(out, B, lengths), lse


def flash_backward(
    rows: Queries, k: Tensor, v: Tensor, causal: bool, lengths: Lengths | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_backward` by the kernel that belongs to it."""
    q, B, lse = rows.q, k.shape[0], rows.lse
    if lengths is not None:
        lse = lse.transpose(0, 1).flatten(1)
    tokens = (_tokens(x, lengths) for x in (rows.dout, q, k, v, rows.out))
    random = q.new_empty(2, dtype=torch.uint64), q.new_empty(0)  # of dropout: nothing reads it
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *tokens, lse, *_sequences(q, k, lengths), 0.0, causal, *random, **_window(lengths)
    )
    return _heads(dq, B, lengths), _heads(dk, B, lengths), _heads(dv, B, lengths)


def _sequences(q: Tensor, k: Tensor, lengths: Lengths | None) -> tuple[Any, ...]:
    """Four arguments of flash attention: cumulative lengths, or none, and the longest."""
    return (None, None, q.shape[2], k.shape[2]) if lengths is None else (*lengths[:2], *lengths.longest)


def _window(lengths: Lengths | None) -> dict[str, int]:
    """Options of flash attention for a causal window: keys before a query's own, and behind it."""
    return (
        {"window_size_left": lengths.window - 1, "window_size_right": 0} if lengths and lengths.window else {}
    )


def _tokens(x: Tensor, lengths: Lengths | None) -> Tensor:
    """(B, heads, T, d) -> (B, T, heads, d), or (B T, heads, d), as flash attention reads it."""
    return x.transpose(1, 2) if lengths is None else x.transpose(1, 2).flatten(0, 1)


def _heads(x: Tensor, B: int, lengths: Lengths | None) -> Tensor:
    """Inverse of `_tokens`, a view."""
    return (x if lengths is None else x.unflatten(0, (B, -1))).transpose(1, 2)
