"""Context parallelism: each rank has a part of every sequence, and only attention looks beyond it.

The queries of a rank see the keys of the others in one of three ways (`cp_method`):

- *ring* (arXiv 2310.01889): keys and values travel round the ranks. Each rank attends to the ones it has while the next
  ones arrive. A rank has one chunk from the front of the sequence and its mirror image from the back (as in Llama 3,
  arXiv 2407.21783): under a causal mask early tokens see few keys and late ones many, so every rank computes equally
  many query-key pairs. (The imbalance: Striped Attention, arXiv 2311.09431.)
- *ulysses* (arXiv 2309.14509): an all-to-all turns a part of the sequence with all heads into the whole sequence with
  a part of the heads, and another one turns the output back. The ranks must divide the heads.
- *all_gather* (Llama 3, arXiv 2407.21783, section 3.3.2; Megatron-LM): every rank gathers all keys and values, which
  are few where heads share them. Backward gathers them again and reduce-scatters their gradients.

Blocks with linear attention exchange tokens for heads, whatever the method (parallel/by_heads.py).

Packed documents change nothing in what is sent. Each rank knows the documents of whole sequences, and computes those
that its queries and the keys present have in common. In a ring, ranks may then compute unequally much. With
`all_gather` any rank may have any queries, so blocks of them are dealt by the work that documents leave
(`sharding/sequence.py`).

Legend: B batch, T sequence, t = T/c tokens of a rank, c ranks, H heads, K key-value heads, d head size, S keys present.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold.comm import Axis, Started
from fivefold.kernels.blockwise_attention import PLAIN, Documents, Scores, Shared
from fivefold.kernels.fused_attention import Core, Sees, attended, cores
from fivefold.kernels.partial_attention import (
    Queries,
    attend,
    attend_backward,
    merge,
    split_heads,
    split_heads_backward,
)
from fivefold.models.base import LanguageModel
from fivefold.models.delta import DeltaCore
from fivefold.models.layers import AttentionCore, Output
from fivefold.parallel import operators
from fivefold.parallel.autograd import sent
from fivefold.parallel.by_heads import DeltaByHeads
from fivefold.parallel.mesh import Mesh
from fivefold.schedules.collectives.collective import joined
from fivefold.schedules.ring_attention import Turn, reach_of, turns
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import Columns
from fivefold.sharding.sequence import gathered_keys, ring_columns, token_spans
from fivefold.sharding.units import HEADS, KEYS, TARGETS


def apply(stage: LanguageModel, mesh: Mesh) -> None:
    """Makes attention see the whole sequence, and weighs the loss by the number of targets. In place.

    Call it after `tensor.apply`, which needs the modules that are replaced here.
    """
    axis = mesh.axis("cp")
    assert axis.size > 1, "one rank needs no context parallelism"
    method = METHODS[mesh.layout.cp_method]
    for name, core in list(stage.named_modules()):
        if isinstance(core, AttentionCore):
            attention = method(core, axis, mesh.layout)
            if isinstance(attention, OverRanks):
                attention.registered = (cores.setdefault(attention.key, attention),)
            stage.set_submodule(name, attention)
        elif isinstance(core, DeltaCore):
            stage.set_submodule(name, DeltaByHeads(core, axis, mesh.layout))
    operators.axes[axis.key] = axis
    stage.output = CountedLoss(stage.output, axis)


class CountedLoss(Output):
    """Weighs the loss by targets. In training it is this rank's mean loss times its share of all targets, times c. The
    mean over ranks is then the mean over all targets, even if the ranks ignore different numbers of them. In evaluation
    the caller counts."""

    def __init__(self, output: Output, axis: Axis) -> None:
        super().__init__()
        self.output, self.axis = output, axis

    def forward(
        self, x_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor | None, bias_V: Tensor | None = None
    ) -> Tensor:
        found = self.output(x_BTD, weight_VD, targets_BT, bias_V)
        if targets_BT is None or not self.training:
            return found
        count = (targets_BT >= 0).sum()
        total = count.clone()
        self.axis.run(TARGETS, total)
        return found * (count * self.axis.size / total.clamp(min=1))


def ring_turns(
    axis: Axis, kv: Tensor, causal: bool, reach: int | None = None
) -> Iterator[tuple[Turn, Tensor]]:
    """Yields each turn of this rank with the keys and values present: (2, B, K, S, d). The next ones arrive while the
    caller computes. All ranks of the ring must iterate to the end. reach: see `turns`."""
    parts, t, d = kv.shape[:3], kv.shape[3], kv.shape[4]
    own = kv
    for turn in turns(axis.size, axis.index, causal, reach):
        arriving = kv.new_empty(*parts, int(t * turn.receives), d)
        leaving = (own if turn.direct else kv)[:, :, :, : int(t * turn.sends)].contiguous()
        started = _exchange(axis, leaving, turn.to, arriving, turn.source)
        yield turn, kv
        if started is not None:
            started()
        kv = arriving


def _exchange(axis: Axis, leaving: Tensor, to: int, arriving: Tensor, source: int) -> Started | None:
    """Starts to send and to receive, each unless it has no elements. Returns `arriving` if something arrives."""
    sends, receives = [(leaving, to)] * (leaving.numel() > 0), [(arriving, source)] * (arriving.numel() > 0)
    return axis.start_moves(sends, receives) if sends or receives else None


def _some_late(axis: Axis, causal: bool) -> bool:
    """True if, in some turn of this rank, only the late half of its queries attends."""
    return any(turn.late for turn in turns(axis.size, axis.index, causal))


class ContextAttention(AttentionCore):
    """Attention of this rank's tokens to those of all ranks of the axis: (B, t, (H + 2K) d) -> (B, t, H d)."""

    def __init__(self, core: AttentionCore, axis: Axis, layout: Layout) -> None:
        super().__init__(core.heads, core.kv_heads, core.causal)
        self.axis, self.layout = axis, layout
        self.key = f"{axis.key} {layout.cp_method} {core.causal}"  # equal in all blocks


class OverRanks(ContextAttention, Core):
    """Attends with all heads of this rank's tokens."""

    registered: tuple[Core, ...] = ()
    """The one in `cores`, which computes the same and stays while a block lives. In a tuple: not a part of this one."""

    def fused(self, qkv: Tensor, cos: Tensor | None, sin: Tensor | None, sees: Sees) -> Tensor:
        return attended(qkv, cos, sin, self, sees)


class RingAttention(OverRanks):
    """Attends to the keys of one rank at a time.

    Keys and values travel in backward as in forward. The gradient for another rank's keys goes straight to their
    owner, in the compute dtype, and is summed there in fp32. That sends fewer bytes than fp32 sums that travel with the
    keys, and each term is rounded once.
    """

    def attend(self, q: Tensor, kv: Tensor, sees: Sees) -> tuple[Tensor, Tensor]:
        causal, axis, shared = self.causal, self.axis, self._shared(q, sees)
        reach, cap = self._reach(q, sees), sees.scores.soft_cap
        half = q.shape[2] // 2
        late = q[:, :, half:].contiguous() if _some_late(axis, causal) else q
        out = lse = q  # placeholders until the first turn sets them
        for number, (turn, (k, v)) in enumerate(ring_turns(axis, kv, causal, reach)):
            present = None if shared is None else shared[number]
            if turn.owner == axis.index:
                out, lse = attend(q, k, v, causal, present, cap)
                out = out.float()
            elif present == []:
                continue  # of other documents only, or of no window
            elif turn.late:
                merge(out[:, :, half:], lse[:, :, half:], *attend(late, k, v, False, present, cap))
            else:
                merge(out, lse, *attend(q, k, v, False, present, cap))
        return out.to(q.dtype).transpose(1, 2).flatten(2), lse  # what the next layer keeps anyway

    def gradients(self, rows: Queries, kv: Tensor, sees: Sees) -> tuple[Tensor, Tensor]:
        shared, reach = self._shared(rows.q, sees), self._reach(rows.q, sees)
        return _ring_gradients(rows, kv, self.causal, self.axis, shared, reach, sees.scores.soft_cap)

    def _shared(self, q: Tensor, sees: Sees) -> list[Shared] | None:
        """What documents and a window leave of each turn. With a window that is tiles on GPUs, too: flash attention
        knows windows only where the last query sees the last key, and no caps."""
        T = q.shape[2] * self.axis.size
        window = sees.scores.window if sees.scores.window < T else 0
        if (documents := sees.parts(q, T)) is None:
            return None
        columns = ring_columns(self.layout, T, self.axis.index, self.causal, window)
        if window or sees.scores.soft_cap:
            return [documents.tiles(*turn, self.causal, q.element_size(), window) for turn in columns]
        return [documents.shared(*turn, self.causal, q) for turn in columns]

    def _reach(self, q: Tensor, sees: Sees) -> int | None:
        return reach_of(self.axis.size, q.shape[2] * self.axis.size, sees.scores.window)


def _ring_gradients(
    rows: Queries,
    kv: Tensor,
    causal: bool,
    axis: Axis,
    shared: list[Shared] | None,
    reach: int | None,
    soft_cap: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of this rank's queries (B, H, t, d), and of its keys and values (2, B, K, t, d), in fp32. What
    turns need is gone when it returns."""
    (B, K, t, d), half = kv.shape[1:], kv.shape[3] // 2
    late = rows.at(slice(half, None)) if _some_late(axis, causal) else rows
    dq = dkv = kv  # placeholders until the first turn sets them
    coming_home: list[tuple[Started, Tensor]] = []
    for number, (turn, (k, v)) in enumerate(ring_turns(axis, kv, causal, reach)):
        present = None if shared is None else shared[number]
        if turn.owner == axis.index:
            dq, dk, dv = attend_backward(rows, k, v, causal, present, soft_cap)
            dq, dkv = dq.float(), torch.stack((dk, dv)).float()
            continue
        leaving = kv.new_empty(0)
        if turn.keys:
            part, dk, dv = attend_backward(late if turn.late else rows, k, v, False, present, soft_cap)
            (dq[:, :, half:] if turn.late else dq).add_(part)
            leaving = torch.stack((dk, dv)).to(kv.dtype)
        arriving = kv.new_empty(2, B, K, int(t * turn.comes_home), d)
        started = _exchange(axis, leaving, turn.owner, arriving, turn.visited)
        _add_arrived(dkv, coming_home)  # from the previous turn
        if started is not None:
            coming_home.append((started, arriving))
    _add_arrived(dkv, coming_home)
    return dq, dkv


def _add_arrived(dkv: Tensor, coming_home: list[tuple[Started, Tensor]]) -> None:
    """Adds the gradients that other ranks send for this rank's keys, or for their early half."""
    for started, arriving in coming_home:
        started()
        dkv[:, :, :, : arriving.shape[3]] += arriving
    coming_home.clear()


class Ulysses(ContextAttention):
    """Attends with H/c heads to the whole sequence."""

    def __init__(self, core: AttentionCore, axis: Axis, layout: Layout) -> None:
        super().__init__(core, axis, layout)
        assert core.heads % axis.size == core.kv_heads % axis.size == 0, "refused by the recipe's rules"
        self.inner = AttentionCore(core.heads // axis.size, core.kv_heads // axis.size, core.causal)

    def fused(self, qkv: Tensor, cos: Tensor | None, sin: Tensor | None, sees: Sees) -> Tensor:
        c, (documents, scores) = self.axis.size, sees
        whole = _WholeSequence.apply(qkv, cos, sin, self.heads, self.kv_heads, self.axis)
        if scores.sink is not None:
            scores = scores._replace(sink=scores.sink.chunk(c)[self.axis.index])
        out = self.inner(whole, documents=documents, scores=scores)

        def forward(x: Tensor) -> Tensor:  # (B, T, H/c d) -> all heads of this rank's tokens (B, t, H d)
            leaving = x.unflatten(1, (c, -1)).transpose(0, 1).contiguous()  # (c, B, t, H/c d)
            return operators.run(self.axis, HEADS, leaving).permute(1, 2, 0, 3).flatten(2)

        def backward(dx: Tensor) -> Tensor:
            leaving = dx.unflatten(2, (c, -1)).permute(2, 0, 1, 3).contiguous()
            return operators.run(self.axis, HEADS, leaving, backward=True).transpose(0, 1).flatten(1, 2)

        return sent(forward, backward, out)


class _WholeSequence(Function):
    """All heads of this rank's tokens (B, t, (H + 2K) d) -> this rank's heads of all tokens (B, T, (H + 2K)/c d).
    Rotary embedding is applied before the exchange, so each rank needs the angles of its own positions only."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        heads: int,
        kv_heads: int,
        axis: Axis,
    ) -> Tensor:
        q, (k, v) = split_heads(qkv, heads, kv_heads, cos, sin)
        ctx.save_for_backward(cos, sin)
        ctx.axis, ctx.sections = axis, [x.shape[1] // axis.size for x in (q, k, v)]
        of_each = [x.unflatten(1, (axis.size, -1)).transpose(0, 1) for x in (q, k, v)]  # (c, B, heads, t, d)
        arrived = operators.run(axis, HEADS, torch.cat(of_each, dim=2))
        return arrived.permute(1, 0, 3, 2, 4).flatten(1, 2).flatten(2)  # sorted by source rank: in order

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        (cos, sin), c = ctx.saved_tensors, ctx.axis.size
        dwhole = grads[0].unflatten(1, (c, -1)).unflatten(3, (sum(ctx.sections), -1))  # (B, c, t, heads, d)
        leaving = dwhole.permute(1, 0, 3, 2, 4).contiguous()  # (c, B, heads, t, d)
        arrived = operators.run(ctx.axis, HEADS, leaving, backward=True)
        dq, dk, dv = (x.transpose(0, 1).flatten(1, 2) for x in arrived.split(ctx.sections, dim=2))
        return split_heads_backward(dq, torch.stack((dk, dv)), cos, sin), *[None] * 5


Seen = tuple[slice, bool, Shared | None]
"""A part of all keys, whether a causal mask hides some of them, and what documents leave."""
Parts = list[tuple[slice, list[Seen]]]
"""Queries of a rank, and which keys they see."""


def parts_of(
    columns: Columns, T: int, causal: bool, documents: Documents | None, like: Tensor, scores: Scores = PLAIN
) -> Parts:
    """What a rank with the queries at these columns computes, given the keys of all T. like: queries. scores: a
    window with documents, and a cap."""
    if documents is None and not causal:
        return [(slice(None), [(slice(T), False, None)])]
    found, start = Parts(), 0
    for a, b in columns:
        rows = slice(start, start := start + b - a)
        if documents is not None:
            keys = gathered_keys((a, b), T, causal, scores.window)
            shared = documents.shared(((a, b),), (keys,), causal, like, scores)
            found.append((rows, [(slice(*keys), causal, shared)]))
        else:
            before: list[Seen] = [(slice(a), False, None)] if a else []
            found.append((rows, [(slice(a, b), True, None), *before]))
    return found


class GatheredAttention(OverRanks):
    """Attends to the keys of all ranks, which are gathered. Those of a whole sequence are c times as many as a rank
    keeps."""

    def attend(self, q: Tensor, kv: Tensor, sees: Sees) -> tuple[Tensor, Tensor]:
        every, parts = self._seen(q, sees)
        k, v = _all_keys(kv, self.axis, every)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        for rows, seen in parts:
            some = q[:, :, rows].contiguous()
            (part, part_lse), *others = (
                attend(some, k[:, :, keys], v[:, :, keys], masked, tiles, sees.scores.soft_cap)
                for keys, masked, tiles in seen
            )
            for other in others:
                part = part.float()
                merge(part, part_lse, *other)
            out[:, :, rows], lse[:, :, rows] = part, part_lse
        return out.transpose(1, 2).flatten(2), lse  # what the next layer keeps anyway

    def gradients(self, rows: Queries, kv: Tensor, sees: Sees) -> tuple[Tensor, Tensor]:
        return _gathered_gradients(rows, kv, self.axis, *self._seen(rows.q, sees), sees.scores.soft_cap)

    def _seen(self, q: Tensor, sees: Sees) -> tuple[Sequence[Columns], Parts]:
        """The columns of each rank, and what this rank computes."""
        T = q.shape[2] * self.axis.size
        every = () if sees.documents is None else sees.documents.columns
        every = every or [joined(token_spans(self.layout, T, index)) for index in range(self.axis.size)]
        own = every[self.axis.index]
        return every, parts_of(own, T, self.causal, sees.parts(q, T), q, sees.scores)


def _all_keys(kv: Tensor, axis: Axis, every: Sequence[Columns]) -> Tensor:
    """The keys and values of all ranks, in the order of the sequence: (2, B, K, T, d). every: the columns of each."""
    gathered = axis.run(KEYS, kv).view(axis.size, *kv.shape)
    whole = kv.new_empty(*kv.shape[:3], axis.size * kv.shape[3], kv.shape[4])
    for piece, place in _pieces(gathered, whole, every):
        place.copy_(piece)
    return whole


def _gathered_gradients(
    rows: Queries, kv: Tensor, axis: Axis, every: Sequence[Columns], parts: Parts, soft_cap: float
) -> tuple[Tensor, Tensor]:
    """Gradients of this rank's queries (B, H, t, d), and of its keys and values (2, B, K, t, d). Those of all keys are
    added up in fp32, and over ranks in the dtype of the message."""
    k, v = whole = _all_keys(kv, axis, every)
    dq = torch.zeros_like(rows.q, dtype=torch.float32)
    dwhole = torch.zeros_like(whole, dtype=torch.float32)
    for at, seen in parts:
        some = rows.at(at)
        for keys, masked, tiles in seen:
            part, dk, dv = attend_backward(some, k[:, :, keys], v[:, :, keys], masked, tiles, soft_cap)
            dq[:, :, at] += part
            dwhole[0][:, :, keys] += dk
            dwhole[1][:, :, keys] += dv
    del k, v, whole
    leaving = kv.new_empty(axis.size, *kv.shape)
    for piece, place in _pieces(leaving, dwhole, every):
        piece.copy_(place)
    del dwhole
    return dq.to(rows.q.dtype), axis.run(KEYS, leaving.flatten(0, 1), backward=True)


def _pieces(by_rank: Tensor, whole: Tensor, every: Sequence[Columns]) -> Iterator[tuple[Tensor, Tensor]]:
    """The same columns of (c, 2, B, K, t, d) and of (2, B, K, T, d), span by span."""
    for part, columns in zip(by_rank, every, strict=True):
        for piece, span in zip(part.split([b - a for a, b in columns], dim=3), columns, strict=True):
            yield piece, whole[:, :, :, slice(*span)]


METHODS = {"ring": RingAttention, "ulysses": Ulysses, "all_gather": GatheredAttention}
