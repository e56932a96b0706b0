"""Attention over the fused projection of queries, keys and values.

On CPUs: matmuls of blocks of queries with the keys they see, with the softmax of native.c between them. For typical
sizes (T 256, d 64) this is about twice as fast as PyTorch's flash attention for CPUs in bf16 (benchmarks/kernels.py).
Elsewhere: PyTorch's scaled_dot_product_attention; for packed documents its attention over sequences of any lengths, on
NVIDIA GPUs in 16 bits, or else a mask.

Documents in packed sequences: a token sees keys of its own document only. tiling.py says which tiles of queries and
keys that leaves.

Legend: B batch, T sequence, H query heads, K key-value heads, G = H/K, d head size, Q queries in a block, S keys seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from inspect import signature
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from fivefold.errors import UserError
from fivefold.kernels import native
from fivefold.kernels.elementwise import rope, to_device
from fivefold.kernels.matmul import wide
from fivefold.kernels.sizes import any_length, keeps_probabilities, query_blocks
from fivefold.kernels.tiling import Tiling, joined_lengths
from fivefold.sharding.parts import Columns


class Scores(NamedTuple):
    """What a model changes about the scores of attention. Each function that attends computes it or refuses it by name.

    window: the keys that a query of causal attention sees, its own the last of them (arXiv 2004.05150); 0: all.
    soft_cap: scores x become soft_cap * tanh(x / soft_cap) (Gemma 2, arXiv 2408.00118); 0: they stay. sink: (H), a
    score beside those of each head's keys, whose value is 0 (the idea: arXiv 2309.17453); of the caller's heads, if it
    has some of them only.
    """

    window: int = 0
    soft_cap: float = 0.0
    sink: Tensor | None = None

    @property
    def plain(self) -> bool:
        """True if they change no score, but may hide some."""
        return not self.soft_cap and self.sink is None

    def refuse(self, why: str, names: Sequence[str] = ("window", "soft_cap", "sink")) -> None:
        """Raises UserError: one of these is set. why: what does not compute it, and what does."""
        for name in names:
            value = getattr(self, name)
            if isinstance(value, Tensor) or value:
                shown = name if isinstance(value, Tensor) else f"{name} = {value}"
                raise UserError(f"attention with {shown}: not supported by {why}")


PLAIN = Scores()
NOT_CAUSAL = "models that are not causal"


class Tile(NamedTuple):
    """A block of queries with the keys that any of them sees, in one matmul.

    rows: sequences of the batch. start, end: queries. low, high: keys. bounds: the keys [from, to) that each query
    sees, counted from `low`: int32 (rows, end - start, 2). None: all keys, or those that a causal mask leaves.
    """

    rows: slice
    start: int
    end: int
    low: int
    high: int
    bounds: Tensor | None = None


class Lengths(NamedTuple):
    """Sequences that lie one behind the other, as flash attention takes them. queries, keys: their cumulative lengths,
    int32 (n + 1) on the device. longest: of queries, of keys. window: keys that a query sees; 0: all."""

    queries: Tensor
    keys: Tensor
    longest: tuple[int, int]
    window: int = 0


Shared = Sequence[Tile] | Lengths
"""What a kernel computes of queries and keys that are of several documents. Empty: none has both."""


class Documents:
    """The documents in a batch of sequences. first_BT: the column at which the document of each token begins.

    columns: of each rank of the context axis, if documents decide it (`sharding.sequence.dealt`); else none.

    On the device: `first`, and `cumulative`, the cumulative lengths of all documents of the flattened batch, int32
    (N + 1). On the host: `number`, for operators, which take tensors only (`numbered`). Tiles are kept, since every
    layer asks for the same.
    """

    columns: tuple[Columns, ...] = ()

    def __init__(self, first_BT: np.ndarray, device: torch.device | str = "cpu") -> None:
        self.tiling, self.device = Tiling(first_BT), torch.device(device)
        self.first_BT, self.shape = self.tiling.first_BT, self.tiling.shape
        self._tiles: dict[tuple[Columns, Columns, bool, int, int], list[Tile]] = {}
        self._lengths: dict[tuple[Columns, Columns], Lengths] = {}
        ends = np.append(np.flatnonzero(self.tiling.begins_BT.ravel()), first_BT.size)
        # Here, and not where they are used: PyTorch's compiler reads attributes, and cannot trace numpy.
        self.first, self.cumulative = self._sent(self.first_BT), self._sent(ends.astype(np.int32))
        number = next(_numbers)
        _by_number[number], self.number = self, torch.tensor(number)

    def filled(self, rows: int) -> Documents:
        """With more sequences, up to `rows`, that are as the first one."""
        if rows == self.shape[0]:
            return self
        more = np.repeat(self.first_BT[:1], rows - self.shape[0], axis=0)
        filled = Documents(np.concatenate([self.first_BT, more]), self.device)
        filled.columns = self.columns  # tokens have been taken by them
        return filled

    def positions(self, columns_t: Tensor) -> Tensor:
        """Positions of the tokens at these columns in their documents: (B, t)."""
        return columns_t - self.first[:, columns_t]

    def mask(self, causal: bool) -> Tensor:
        """True where a query (dim 2) sees a key (dim 3): (B, 1, T, T) on the device."""
        seen = self.first[:, :, None] == self.first[:, None, :]
        return (seen.tril() if causal else seen)[:, None]

    def tiles(
        self, queries: Columns, keys: Columns, causal: bool, element_size: int, window: int = 0
    ) -> list[Tile]:
        """The tiles of queries and keys at these columns. Queries and keys of a tile are counted among them. A query
        that sees none of the keys may be in no tile."""
        asked = queries, keys, causal, element_size, window
        if asked not in self._tiles:
            tiles = list[Tile]()
            for rows, start, end, low, high, bounds_BQ2 in self.tiling.blocks(*asked):
                inside = np.clip(bounds_BQ2[rows, start:end] - low, 0, high - low)
                tiles.append(Tile(rows, start, end, low, high, self._sent(inside.astype(np.int32))))
            self._tiles[asked] = tiles
        return self._tiles[asked]

    def shared(
        self, queries: Columns, keys: Columns, causal: bool, like: Tensor, scores: Scores = PLAIN
    ) -> Shared:
        """What the kernel for queries like these computes at these columns. Causal: as in `Tiling.pairs`. scores: a
        window, a cap. With flash attention and a window, the last query sees the last key."""
        window = scores.window
        if scores.soft_cap or not has_flash(like) or torch.version.hip:  # AMD's masks, and its lse is another
            return self.tiles(queries, keys, causal, like.element_size(), window)
        if (asked := (queries, keys)) not in self._lengths:
            found_2n = joined_lengths(np.stack([self.tiling.lengths(queries), self.tiling.lengths(keys)]))
            if not found_2n.all(0).any():
                return []
            q, k = (self._sent(np.append(0, of).cumsum(dtype=np.int32)) for of in found_2n)
            # At least 2: sequences of one query each are read in another way, which knows none without a query.
            longest_q, longest_k = (max(2, int(of.max())) for of in found_2n)
            self._lengths[asked] = Lengths(q, k, (longest_q, longest_k))
        return self._lengths[asked]._replace(window=window)

    def _sent(self, numbers: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(numbers), self.device)


_numbers = count()
_by_number: WeakValueDictionary[int, Documents] = WeakValueDictionary()


def numbered(number: Tensor | None) -> Documents | None:
    """The documents with this number, which their batch keeps until backward is done."""
    return None if number is None else _by_number[int(number)]


@lru_cache(maxsize=16)
def one_document(B: int, T: int, device: torch.device) -> Documents:
    """Sequences that hold one document each, for windows in them."""
    return Documents(np.zeros((B, T), np.int64), device)


def whole_tiles(
    B: int, T: int, causal: bool, element_size: int, documents: Documents | None = None, window: int = 0
) -> Sequence[Tile]:
    """The tiles of whole sequences; without documents and window those of a causal mask, or of none."""
    if documents is None and 0 < window < T:
        documents = one_document(B, T, torch.device("cpu"))
    if documents is not None:
        assert documents.shape == (B, T), f"documents of {documents.shape}, tokens of {(B, T)}"
        return documents.tiles(((0, T),), ((0, T),), causal, element_size, window)
    return [Tile(slice(0, B), *block[:2], 0, block[2]) for block in query_blocks(T, causal, element_size)]


def sums_dtype(tiles: Sequence[Tile], dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of keys are summed over tiles: fp32 if a sequence is in many."""
    return dtype if len({tile.start for tile in tiles}) <= 2 else torch.float32


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, documents: Documents | None = None,
    scores: Scores = PLAIN,
) -> Tensor:  # fmt: skip
    """softmax(q k^T / sqrt(d)) v. q (B, T, H, d), k and v (B, S, K, d) with K dividing H; returns (B, T, H, d).

    Causal: the last query sees every key (queries are the last T of S positions). documents: a query sees keys of its
    own document only; S = T. scores: a cap or a sink is written out, with all scores in memory. Raises UserError: a
    window without a causal mask."""
    T, S = q.shape[1], k.shape[1]
    if not causal:
        scores.refuse(NOT_CAUSAL, ["window"])
    if has_flash(q) and scores.plain and T == S and (documents is not None or scores.window):
        return _of_any_length(q, k, v, causal, documents, scores.window)
    mask = None
    if documents is not None:
        mask = documents.mask(causal)
    elif causal and (T != S or scores.window or not scores.plain):
        mask = torch.ones(1, 1, T, S, dtype=torch.bool, device=q.device).tril(S - T)
    if scores.window and mask is not None:
        mask = mask.triu(S - T - scores.window + 1)
    if not scores.plain:
        return _written_out(q, k, v, mask, scores)
    out = F.scaled_dot_product_attention(
        *(wide(x).transpose(1, 2) for x in (q, k, v)),
        attn_mask=mask, is_causal=causal and mask is None, enable_gqa=q.shape[2] != k.shape[2],
    )  # fmt: skip
    return out.transpose(1, 2).to(q.dtype)


def _written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """`attention` in fp32. mask: True where a query sees a key, (B or 1, 1, T, S)."""
    heads, T = q.shape[2] // k.shape[2], q.shape[1]
    k, v = (x.float().repeat_interleave(heads, dim=2) for x in (k, v))
    x_BHTS = torch.einsum("bthd,bshd->bhts", q.float() * q.shape[3] ** -0.5, k)
    if scores.soft_cap:
        x_BHTS = scores.soft_cap * torch.tanh(x_BHTS / scores.soft_cap)
    if mask is not None:
        x_BHTS = x_BHTS.masked_fill(~mask, -torch.inf)
    if scores.sink is not None:  # the last column
        sink_BHT1 = scores.sink.float()[:, None, None].expand(len(q), -1, T, 1)
        x_BHTS = torch.cat((x_BHTS, sink_BHT1), dim=3)
    p_BHTS = x_BHTS.softmax(3)[..., : k.shape[1]]
    return torch.einsum("bhts,bshd->bthd", p_BHTS, v).to(q.dtype)


def has_flash(q: Tensor, d: int = 0) -> bool:
    """True if PyTorch's flash attention takes queries (..., d), or with heads of width d. "meta" stands for a GPU:
    tests call the kernels there, for shapes."""
    return q.device.type in ("cuda", "meta") and any_length(q.element_size(), d or q.shape[-1])


def _of_any_length(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, documents: Documents | None, window: int
) -> Tensor:
    """Flash attention over the documents of the flattened batch. It computes nothing between documents."""
    from torch.nn.attention.varlen import varlen_attn  # on CPUs nobody needs it

    B, T = q.shape[:2]
    ends = torch.arange(0, B * T + 1, T, device=q.device).int() if documents is None else documents.cumulative
    shared, options = q.shape[2] // k.shape[2], {}
    if "enable_gqa" in signature(varlen_attn).parameters:
        options["enable_gqa"] = shared > 1
    elif shared > 1:  # before torch 2.13
        k, v = (x.repeat_interleave(shared, dim=2) for x in (k, v))
    out = varlen_attn(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), ends, ends, T, T,  # (B T, heads, d)
        window_size=(window - 1, 0 if causal else -1), **options,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out.unflatten(0, (B, T))


def qkv_attention(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    cos: Tensor | None,
    sin: Tensor | None,
    causal: bool,
    recompute: bool = False,
    documents: Documents | None = None,
    scores: Scores = PLAIN,
) -> Tensor:
    """Attention on one fused projection: rotates queries and keys (if cos is given) and attends.

    qkv (B, T, (H + 2K) d): all query heads, then key heads, then value heads. cos, sin (T, d/2) fp32 or None.
    recompute: backward computes the probabilities again instead of keeping them. documents, scores: see `attention`.
    Angles need not begin anew at a document: scores depend on differences of positions. Returns (B, T, H d). Raises
    UserError: a window without a causal mask.
    """
    if not causal:
        scores.refuse(NOT_CAUSAL, ["window"])
    if native.usable(qkv) and scores.plain:
        window = scores.window if scores.window < qkv.shape[1] else 0
        return _QKVAttention.apply(qkv, heads, kv_heads, cos, sin, causal, recompute, documents, window)
    q, k, v = heads_of(qkv, heads, kv_heads, cos, sin)
    if cos is not None and qkv.is_cuda and torch.is_grad_enabled():
        v = v.contiguous()  # a view would keep all of qkv for backward, beside the rotated queries and keys
    if recompute and torch.is_grad_enabled() and not torch.compiler.is_compiling() and _is_plain():
        attended = checkpoint(attention, q, k, v, causal, documents, scores, use_reentrant=False)
        return attended.flatten(2)
    return attention(q, k, v, causal, documents, scores).flatten(2)


def _is_plain() -> bool:
    """True if PyTorch may use no fused attention, which keeps no probabilities. A compiled block cannot ask."""
    cuda = torch.backends.cuda
    return not (cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled())


def heads_of(
    qkv: Tensor, heads: int, kv_heads: int, cos: Tensor | None, sin: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, (B, T, H, d) and twice (B, T, K, d), of qkv (B, T, (H + 2K) d), rotated if cos is
    given."""
    q, k, v = qkv.unflatten(2, (heads + 2 * kv_heads, -1)).split([heads, kv_heads, kv_heads], dim=2)
    if cos is not None and sin is not None:
        q, k = rope(q, cos, sin), rope(k, cos, sin)
    return q, k, v


class _QKVAttention(Function):
    """The CPU path. Backward writes the gradients of q, k and v directly into the gradient of qkv."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, heads: int, kv_heads: int, cos: Tensor | None, sin: Tensor | None, causal: bool,
        recompute: bool, documents: Documents | None, window: int,
    ):  # fmt: skip
        qkv = qkv.contiguous()
        B, T, width = qkv.shape
        d = width // (heads + 2 * kv_heads)
        assert d * (heads + 2 * kv_heads) == width
        for table in (cos, sin):
            assert table is None or (table.shape == (T, d // 2) and table.dtype == torch.float32)
            assert table is None or table.is_contiguous()
        k_BKTd = _heads_first(qkv, heads, kv_heads, d, 0, T, cos, sin)
        v_BKTd = _heads_first(qkv, heads + kv_heads, kv_heads, d, 0, T)
        out = qkv.new_empty(B, T, heads * d)
        queries, probabilities, keeps = [], [], keeps_probabilities(T) and not recompute
        k, v = wide(k_BKTd), wide(v_BKTd)
        tiles = whole_tiles(B, T, causal, qkv.element_size(), documents, window)
        for tile in tiles:  # B is the number of a tile's rows from here on
            q = _heads_first(qkv[tile.rows], 0, heads, d, tile.start, tile.end, cos, sin)
            p = _probabilities(q, _keys(k, tile), tile, causal)  # (BK, GQ, S)
            o = torch.bmm(p, _flat(_keys(v, tile)))  # (BK, GQ, d)
            _heads_last(o.view(q.shape), out[tile.rows], 0, tile.start)
            queries.append(q)
            if keeps:
                probabilities.append(p.to(q.dtype))
        ctx.save_for_backward(k_BKTd, v_BKTd, cos, sin, *queries, *probabilities)
        ctx.causal, ctx.heads, ctx.keeps, ctx.tiles = causal, heads, keeps, tiles
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        k, v, cos, sin, *saved = ctx.saved_tensors
        (B, K, T, d), tiles = k.shape, ctx.tiles
        dout, dk, dv = grads[0].contiguous(), None, None  # (B, T, H d)
        dqkv = k.new_empty(B, T, (ctx.heads + 2 * K) * d)
        k, v = wide(k), wide(v)
        total_dtype = sums_dtype(tiles, k.dtype)
        for i in reversed(range(len(tiles))):  # the last one may see every key: its matmuls start the sums
            tile, q = tiles[i], wide(saved[i])
            start, keys = tile.start, _keys(k, tile)
            p = wide(saved[len(tiles) + i]) if ctx.keeps else _probabilities(q, keys, tile, ctx.causal)
            do = _heads_first(dout[tile.rows], 0, ctx.heads, d, start, tile.end)
            do = _stack(wide(do), K)  # (BK, GQ, d)
            # (BK, GQ, S): gradient of p, then of the scores
            ds = torch.bmm(do, _turned(_keys(v, tile)))
            shape = softmax_shape(p, tile, ctx.heads, ctx.causal, d)
            native.call("softmax_backward", p.dtype, p, ds, *shape)  # in place of ds
            dq = torch.bmm(ds, _flat(keys)).view(q.shape)
            _heads_last(dq, dqkv[tile.rows], 0, start, cos, sin)
            dv_block = torch.bmm(p.transpose(1, 2), do).view(keys.shape)
            dk_block = torch.bmm(ds.transpose(1, 2), _stack(q, K)).view(keys.shape)
            dk = summed(dk, dk_block, tile, k.shape, total_dtype)
            dv = summed(dv, dv_block, tile, k.shape, total_dtype)
        assert dk is not None
        assert dv is not None
        _heads_last(dk, dqkv, ctx.heads, 0, cos, sin)
        _heads_last(dv, dqkv, ctx.heads + K, 0)
        return dqkv, *[None] * 8


def _keys(x_BKTd: Tensor, tile: Tile) -> Tensor:
    """A view of a tile's keys or values: (B, K, S, d)."""
    return x_BKTd[tile.rows, :, tile.low : tile.high]


def _probabilities(q_BHQd: Tensor, k_BKSd: Tensor, tile: Tile, causal: bool) -> Tensor:
    """Probabilities of a tile's queries over its keys: (B K, G Q, S)."""
    scores = torch.bmm(_stack(wide(q_BHQd), k_BKSd.shape[1]), _turned(k_BKSd))
    shape = softmax_shape(scores, tile, q_BHQd.shape[1], causal, q_BHQd.shape[3])
    # In place; it could return lse in None's
    native.call("softmax_forward", scores.dtype, scores, None, *shape)
    return scores


def softmax_shape(scores: Tensor, tile: Tile, heads: int, causal: bool, d: int) -> tuple[Any, ...]:
    """The last arguments of the softmax kernels. scores: (B K, G Q, S)."""
    queries = tile.end - tile.start
    matrices = scores.shape[0] * scores.shape[1] // queries
    return matrices, queries, scores.shape[2], tile.start, int(causal), float(d**-0.5), tile.bounds, heads


def summed(
    total: Tensor | None, part_BKSd: Tensor, tile: Tile, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    """Adds a tile's part to a gradient of all keys (B, K, T, d). The first part begins it."""
    if total is None:
        if part_BKSd.shape == shape:
            return part_BKSd.to(dtype)
        total = part_BKSd.new_zeros(shape, dtype=dtype)
    here = _keys(total, tile)
    if total.dtype != torch.float32 or part_BKSd.dtype == torch.float32 or not native.usable(part_BKSd):
        here += part_BKSd
        return total
    B, K, S, d = part_BKSd.shape
    native.call("accumulate_parts", part_BKSd.dtype, here, part_BKSd, B * K, shape[2] * d, S * d)
    return total


def _stack(x_BHQd: Tensor, kv_heads: int) -> Tensor:
    """Stacks the query heads that share a key-value head: (B K, G Q, d)."""
    B, H, Q, d = x_BHQd.shape
    return x_BHQd.reshape(B * kv_heads, H // kv_heads * Q, d)


def _flat(x_BKSd: Tensor) -> Tensor:
    """Views (B, K, S, d), perhaps cut in S, as (B K, S, d) without a copy."""
    B, K, S, d = x_BKSd.shape
    return x_BKSd.as_strided((B * K, S, d), (x_BKSd.stride(1), d, 1), x_BKSd.storage_offset())


def _turned(x_BKSd: Tensor) -> Tensor:
    """(B, K, S, d), perhaps cut in S -> (B K, d, S). A part is copied first: matmuls copy a transpose with gaps, too,
    but element by element."""
    return x_BKSd.contiguous().flatten(0, 1).transpose(1, 2)


def _heads_first(
    x: Tensor,
    first: int,
    heads: int,
    d: int,
    start: int,
    end: int,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> Tensor:
    """Heads first..first+heads of tokens start..end of x (B, T, all heads x d), rotated if cos is given:
    (B, heads, end-start, d)."""
    B, T, width = x.shape
    Q, out = end - start, x.new_empty(B, heads, end - start, d)
    cos, sin = (None, None) if cos is None or sin is None else (cos[start:end], sin[start:end])
    part = x[:, start:, first * d :]  # its pointer is the first head of the first token
    steps = T * width, d, width, heads * Q * d, Q * d, d
    native.call("rope", x.dtype, part, cos, sin, out, B, heads, Q, d, *steps, 1.0)
    return out


def _heads_last(
    x_BHQd: Tensor, out: Tensor, first: int, start: int, cos: Tensor | None = None, sin: Tensor | None = None
) -> None:
    """Inverse of `_heads_first`: writes into heads first.. of tokens start.. of out (B, T, all heads x d), rotated by
    the opposite angles."""
    (B, heads, Q, d), (T, width), end = x_BHQd.shape, out.shape[1:], start + x_BHQd.shape[2]
    cos, sin = (None, None) if cos is None or sin is None else (cos[start:end], sin[start:end])
    part, x_BHQd = out[:, start:, first * d :], x_BHQd.to(out.dtype).contiguous()
    steps = heads * Q * d, Q * d, d, T * width, d, width
    native.call("rope", out.dtype, x_BHQd, cos, sin, part, B, heads, Q, d, *steps, -1.0)
