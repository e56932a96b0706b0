"""Context parallelism: each rank has a part of every sequence, and only attention looks beyond it.

Two ways to let the queries of a rank see the keys of the others (`cp_method`):

- *ring* (arXiv 2310.01889): keys and values travel round the ranks, and each adds what its queries find among them,
  while the next ones are on their way. A rank has one chunk from the front of the sequence and its mirror image from
  the back (as Llama 3 divides, arXiv 2407.21783): under a causal mask early tokens see little and late ones much, and
  so every rank computes equally many query-key pairs. (The imbalance: Striped Attention, arXiv 2311.09431.)
- *ulysses* (arXiv 2309.14509): an all-to-all turns a part of the sequence with all heads into the whole sequence with
  a part of the heads, and another one turns the output back. The heads must divide.

Legend: B batch, T sequence, t = T/c tokens of a rank, c ranks, H heads, K key-value heads, d head size, S keys at hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold import kernels
from fivefold.kernels.partial_attention import (
    Queries,
    attend,
    attend_backward,
    merge,
    queries,
    split_heads,
    split_heads_backward,
)
from fivefold.models.layers import AttentionCore, Output
from fivefold.models.model import LanguageModel
from fivefold.parallel.mesh import Mesh
from fivefold.sharding import token_spans


def positions(T: int, mesh: Mesh) -> Tensor:
    """Positions of this rank's tokens in a sequence of T: (t)."""
    mine = token_spans(mesh.layout, T, mesh.index("cp"))
    return torch.cat([torch.arange(start, stop, device=mesh.device) for start, stop in mine])


def take(tokens_BT: Tensor, mesh: Mesh) -> Tensor:
    """This rank's columns of inputs or targets: (B, t)."""
    if mesh.size("cp") == 1:
        return tokens_BT
    mine = token_spans(mesh.layout, tokens_BT.shape[1], mesh.index("cp"))
    return torch.cat([tokens_BT[:, start:stop] for start, stop in mine], dim=1)


def apply(stage: LanguageModel, mesh: Mesh) -> None:
    """Lets attention look beyond this rank's part of the sequence, and weighs the loss. In place.

    After `tensor.apply`, which needs the modules that are replaced here.
    """
    group = mesh.group("cp")
    assert group is not None, "one rank needs no context parallelism"
    axis = ContextAxis(group, mesh.size("cp"), mesh.index("cp"))
    method = Ulysses if mesh.layout.cp_method == "ulysses" else RingAttention
    for name, core in list(stage.named_modules()):
        if isinstance(core, AttentionCore):
            stage.set_submodule(name, method(core, axis))
    stage.output = CountedLoss(stage.output, axis)


class CountedLoss(Output):
    """In training: the mean loss of this rank's targets times their share of all that count, times c. Its mean over
    the ranks is the mean over all targets, however the ignored ones lie. In evaluation the caller counts."""

    def __init__(self, output: Output, axis: ContextAxis) -> None:
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
        dist.all_reduce(total, group=self.axis.group)
        return found * (count * self.axis.size / total.clamp(min=1))


@dataclass(frozen=True)
class ContextAxis:
    """The context axis as one rank sees it, and what travels on it.

    In the ring messages go from each rank to the one before it. So the keys of rank j meet first the ranks j-1 .. 0,
    whose late queries see all of them, and then the ranks c-1 .. j+1, whose queries all see their early half: from
    rank 0 on only that half travels.
    """

    group: dist.ProcessGroup
    size: int
    index: int

    def turns(self, kv: Tensor, causal: bool) -> Iterator[tuple[int, Tensor]]:
        """Yields (owner, its keys and values (2, B, K, S, d)), this rank's own first. The next ones arrive while the
        caller computes. All ranks of the ring must iterate to the end."""
        own = kv.shape
        for turn in range(self.size):
            arriving, works = kv, []
            if turn + 1 < self.size:
                leaving = kv[:, :, :, : self.length(self.index - 1, turn + 1, own[3], causal)].contiguous()
                arriving = kv.new_empty(*own[:3], self.length(self.index, turn + 1, own[3], causal), own[4])
                works = self.exchange(leaving, self.index - 1, arriving, self.index + 1)
            yield (self.index + turn) % self.size, kv
            for work in works:
                work.wait()
            kv = arriving

    def length(self, index: int, turn: int, t: int, causal: bool) -> int:
        """Keys that rank `index` has in a turn: all of their owner's, or their early half."""
        return t if not causal or index % self.size + turn < self.size else t // 2

    def exchange(self, leaving: Tensor, to: int, arriving: Tensor, source: int) -> list[dist.Work]:
        """Starts to send to one rank of the axis and to receive from another; both are contiguous."""
        send = dist.P2POp(dist.isend, leaving, group=self.group, group_peer=to % self.size)
        receive = dist.P2POp(dist.irecv, arriving, group=self.group, group_peer=source % self.size)
        return dist.batch_isend_irecv([send, receive])


class RingAttention(AttentionCore):
    """(B, t, (H + 2K) d) -> (B, t, H d), attending to the keys of all ranks of the axis."""

    def __init__(self, core: AttentionCore, axis: ContextAxis) -> None:
        super().__init__(core.heads, core.kv_heads, core.causal)
        self.axis = axis

    @torch.compiler.disable
    def forward(self, qkv: Tensor, cos_Td: Tensor | None = None, sin_Td: Tensor | None = None) -> Tensor:
        return _Ring.apply(qkv, cos_Td, sin_Td, self.heads, self.kv_heads, self.causal, self.axis)


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor | None, sin: Tensor | None,
        heads: int, kv_heads: int, causal: bool, axis: ContextAxis,
    ):  # fmt: skip
        q, kv = split_heads(qkv, heads, kv_heads, cos, sin)
        half = q.shape[2] // 2
        late = q[:, :, half:].contiguous() if causal and axis.index + 1 < axis.size else q
        out = lse = q  # until the first turn has set them
        for owner, (k, v) in axis.turns(kv, causal):
            if owner == axis.index:
                out, lse = attend(q, k, v, causal)
                out = out.float()
            elif causal and owner > axis.index:
                merge(out[:, :, half:], lse[:, :, half:], *attend(late, k, v, causal=False))
            else:
                merge(out, lse, *attend(q, k, v, causal=False))
        out = out.to(q.dtype).transpose(1, 2).flatten(2)  # (B, t, H d): the next layer keeps it anyway
        ctx.save_for_backward(q, kv, out, lse, cos, sin)
        ctx.causal, ctx.axis = causal, axis
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        q, kv, out, lse, cos, sin = ctx.saved_tensors
        out, dout = (x.unflatten(2, (q.shape[1], -1)).transpose(1, 2).contiguous() for x in (out, grads[0]))
        dq, dkv = _ring_gradients(queries(q, dout, out, lse), kv, ctx.causal, ctx.axis)
        return split_heads_backward(dq.to(q.dtype), dkv.to(q.dtype), cos, sin), *[None] * 6


def _ring_gradients(rows: Queries, kv: Tensor, causal: bool, axis: ContextAxis) -> tuple[Tensor, Tensor]:
    """Gradients of this rank's queries (B, H, t, d), and of its keys and values (2, B, K, t, d), in fp32.

    Keys and values travel as in forward. What a rank finds for the keys of another goes straight to their owner, in
    the dtype of the computation, and is summed there in fp32: fewer bytes than sums in fp32 that travel with the keys,
    and each term is rounded once.
    """
    (B, K, t, d), half = kv.shape[1:], kv.shape[3] // 2
    late = rows.late(half) if causal and axis.index + 1 < axis.size else rows
    dq = dkv = kv  # until the first turn has set them
    coming_home: list[tuple[list[dist.Work], Tensor, Tensor]] = []  # what was sent is kept until it has left
    for turn, (owner, (k, v)) in enumerate(axis.turns(kv, causal)):
        if owner == axis.index:
            dq, dk, dv = attend_backward(rows, k, v, causal)
            dq, dkv = dq.float(), torch.stack((dk, dv)).float()
            continue
        upper = causal and owner > axis.index
        part, dk, dv = attend_backward(late if upper else rows, k, v, causal=False)
        (dq[:, :, half:] if upper else dq).add_(part)
        leaving = torch.stack((dk, dv)).to(kv.dtype)
        arriving = kv.new_empty(2, B, K, axis.length(axis.index - turn, turn, t, causal), d)
        works = axis.exchange(leaving, owner, arriving, axis.index - turn)
        _add_arrived(dkv, coming_home)  # those of the last turn
        coming_home.append((works, arriving, leaving))
    _add_arrived(dkv, coming_home)
    return dq, dkv


def _add_arrived(dkv: Tensor, coming_home: list[tuple[list[dist.Work], Tensor, Tensor]]) -> None:
    """Waits for gradients that other ranks have found for the keys of this one, or for their early half."""
    for works, arriving, _ in coming_home:
        for work in works:
            work.wait()
        dkv[:, :, :, : arriving.shape[3]] += arriving
    coming_home.clear()


class Ulysses(AttentionCore):
    """(B, t, (H + 2K) d) -> (B, t, H d), attending with H/c of the heads to the whole sequence."""

    def __init__(self, core: AttentionCore, axis: ContextAxis) -> None:
        super().__init__(core.heads, core.kv_heads, core.causal)
        self.axis = axis

    @torch.compiler.disable
    def forward(self, qkv: Tensor, cos_Td: Tensor | None = None, sin_Td: Tensor | None = None) -> Tensor:
        c = self.axis.size
        assert self.heads % c == 0
        assert self.kv_heads % c == 0
        whole = _WholeSequence.apply(qkv, cos_Td, sin_Td, self.heads, self.kv_heads, self.axis)
        out = kernels.qkv_attention(whole, self.heads // c, self.kv_heads // c, None, None, self.causal)
        return _WholeHeads.apply(out, self.axis)


class _WholeSequence(Function):
    """All heads of this rank's tokens (B, t, (H + 2K) d) -> this rank's heads of all tokens (B, T, (H + 2K)/c d),
    rotated on the way: so each rank needs the angles of its own positions only."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        heads: int,
        kv_heads: int,
        axis: ContextAxis,
    ) -> Tensor:
        q, (k, v) = split_heads(qkv, heads, kv_heads, cos, sin)
        ctx.save_for_backward(cos, sin)
        ctx.axis, ctx.sections = axis, [x.shape[1] // axis.size for x in (q, k, v)]
        of_each = [x.unflatten(1, (axis.size, -1)).transpose(0, 1) for x in (q, k, v)]  # (c, B, heads, t, d)
        arrived = _swap(torch.cat(of_each, dim=2), axis)
        return arrived.permute(1, 0, 3, 2, 4).flatten(1, 2).flatten(2)  # by the rank they come from: in order

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        (cos, sin), c = ctx.saved_tensors, ctx.axis.size
        dwhole = grads[0].unflatten(1, (c, -1)).unflatten(3, (sum(ctx.sections), -1))  # (B, c, t, heads, d)
        arrived = _swap(dwhole.permute(1, 0, 3, 2, 4).contiguous(), ctx.axis)  # (c, B, heads, t, d)
        dq, dk, dv = (x.transpose(0, 1).flatten(1, 2) for x in arrived.split(ctx.sections, dim=2))
        return split_heads_backward(dq, torch.stack((dk, dv)), cos, sin), *[None] * 5


class _WholeHeads(Function):
    """This rank's heads of all tokens (B, T, H/c d) -> all heads of this rank's tokens (B, t, H d)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: ContextAxis) -> Tensor:
        ctx.axis = axis
        arrived = _swap(
            x.unflatten(1, (axis.size, -1)).transpose(0, 1).contiguous(), axis
        )  # (c, B, t, H/c d)
        return arrived.permute(1, 2, 0, 3).flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        leaving = grads[0].unflatten(2, (ctx.axis.size, -1)).permute(2, 0, 1, 3).contiguous()
        return _swap(leaving, ctx.axis).transpose(0, 1).flatten(1, 2), None


def _swap(leaving: Tensor, axis: ContextAxis) -> Tensor:
    """Sends slice i to rank i; returns what the ranks have sent, by rank."""
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving, group=axis.group)
    return arriving
