"""The computation of a mixture of experts after its router: sorts tokens by expert, computes all experts in one grouped
matmul, and returns the results to their tokens. Functions of tensors.

Legend: N tokens, K experts of a token, E experts, C chunks, M rows (a token once for each of its experts, less those
dropped), D model, F features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold.kernels.matmul import wide, widened
from fivefold.kernels.rounded import RoundedMatmuls


class Assignment(NamedTuple):
    """The assignment of tokens to rows. Slot s of token n has index s N + n, so first choices come before second ones.

    order_M: the slot of each row; rows are sorted by chunk, then by expert, then by slot. Slot N K is nobody's: such a
    row fills up an expert's (`evened`). place_NK: the row of each slot, or M if it is dropped. counts_CE: rows of each
    expert in each chunk. chosen_E: slots of each expert, including dropped ones.
    """

    order_M: Tensor
    place_NK: Tensor
    counts_CE: Tensor
    chosen_E: Tensor

    @property
    def tokens_M(self) -> Tensor:
        """The token of each row; 0 for a row that is nobody's."""
        return self.order_M % self.place_NK.shape[0]


def assign(chosen_NK: Tensor, experts: int, capacity: int = 0, chunks: int = 1) -> Assignment:
    """Sorts slots by expert. capacity: most rows per expert; the first slots are kept. 0: no limit. chunks: the kept
    rows of each expert are cut into so many equal parts."""
    slots = chosen_NK.t().reshape(-1)
    order, ones = slots.argsort(stable=True), torch.ones_like(slots)
    # not bincount: on a GPU it waits for its result
    chosen = counts = slots.new_zeros(experts).scatter_add_(0, slots, ones)
    if capacity:
        order = order[_nth(slots[order], counts) < capacity]
        counts = counts.clamp(max=capacity)
    counts_CE = counts[None]
    if chunks > 1:
        expert = slots[order]
        chunk = _nth(expert, counts) * chunks // counts[expert]
        counts_CE = slots.new_zeros(chunks * experts)
        counts_CE = counts_CE.scatter_add_(0, chunk * experts + expert, ones[: len(order)]).view(chunks, -1)
        order = order[chunk.argsort(stable=True)]
    place = torch.full_like(slots, len(order))
    place[order] = torch.arange(len(order), device=order.device)
    return Assignment(order, place.view(chosen_NK.shape[::-1]).t().contiguous(), counts_CE, chosen)


def evened(way: Assignment, dtype: torch.dtype) -> Assignment:
    """Adds rows that are nobody's behind those of each expert, so that each has a multiple of a power of 2, at most an
    eighth of the mean. Without chunks. Unchanged if slots were dropped, and but in bf16 on CPUs. In traces slots are
    shared evenly.

    There oneDNN compiles a matmul for each number of rows that occurs, which takes several times as long as the matmul.
    The added rows take 1/16 of the experts' time."""
    counts_E, slots, experts = way.counts_CE[0], way.place_NK.numel(), way.counts_CE.shape[1]
    part = 1 << max(1, slots // (8 * experts)).bit_length() - 1
    compiles = dtype == torch.bfloat16 and counts_E.device.type == "cpu"
    if not compiles or part == 1 or len(way.order_M) < slots:
        return way
    rows_E = (counts_E + part - 1) // part * part
    before_E = (rows_E - counts_E).cumsum(0) - (rows_E - counts_E)
    place_M = torch.arange(slots) + before_E.repeat_interleave(counts_E, output_size=slots)
    if hasattr(counts_E, "fake"):
        rows = sum(-(-(slots // experts + (e < slots % experts)) // part) * part for e in range(experts))
    else:
        rows = int(rows_E.sum())
    order = torch.full((rows,), slots)
    order[place_M] = way.order_M
    return way._replace(order_M=order, place_NK=place_M[way.place_NK], counts_CE=rows_E[None])


def _nth(expert_M: Tensor, counts_E: Tensor) -> Tensor:
    """The number of each row among those of its expert, for rows sorted by expert."""
    first_E = counts_E.cumsum(0) - counts_E
    return torch.arange(len(expert_M), device=expert_M.device) - first_E[expert_M]


def dispatch(x_ND: Tensor, assignment: Assignment) -> Tensor:
    """The rows that experts compute: each token once for each of its experts. (M, D)."""
    return _Dispatch.apply(x_ND, assignment)


def combine(rows_MD: Tensor, weights_NK: Tensor, assignment: Assignment) -> Tensor:
    """The weighted sum of each token's rows; dropped ones count as zero. (N, D) in the rows' dtype."""
    return _Combine.apply(rows_MD, weights_NK.to(rows_MD.dtype), assignment)


def grouped_linear(
    rows_MD: Tensor, weight_EFD: Tensor, counts_E: Tensor, how: RoundedMatmuls | None = None
) -> Tensor:
    """Multiplies rows sorted by expert with their expert's weight: counts_E[0] rows with weight 0, and so on. (M,
    F)."""
    offsets = counts_E.cumsum(0).to(torch.int32)
    if how is not None or widened(rows_MD, weight_EFD):
        return _Grouped.apply(rows_MD, weight_EFD, offsets, how)
    return F.grouped_mm(rows_MD, weight_EFD.transpose(1, 2), offs=offsets)


class _Grouped(Function):
    """Rows (M, D), weights (E, F, D) -> (M, F). Backward converts the factors again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor, how: RoundedMatmuls | None) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        ctx.how = how
        x, w = (wide(rows), wide(weight)) if how is None else (how.round(rows), how.round_experts(weight))
        return F.grouped_mm(x, w.transpose(1, 2), offs=ends).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        (rows, weight, ends), dy, how = ctx.saved_tensors, grads[0].contiguous(), ctx.how
        if how is None:
            drows = F.grouped_mm(wide(dy), wide(weight), offs=ends).to(dy.dtype)
            return drows, F.grouped_mm(wide(dy).t(), wide(rows), offs=ends).to(dy.dtype), None, None
        w = how.round_experts(weight.transpose(1, 2)).transpose(1, 2)
        drows = F.grouped_mm(how.round(dy, how.gradients), w, offs=ends)
        del w  # before the next factors; a tile of these may have rows of two experts
        dy, x = how.round(dy.t(), how.gradients), how.round(rows.t()).t()
        return drows, F.grouped_mm(dy, x, offs=ends), None, None


class _Dispatch(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, assignment: Assignment) -> Tensor:
        ctx.assignment = assignment
        return x.index_select(0, assignment.tokens_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        return _sum_rows(grads[0], ctx.assignment.place_NK), None


class _Combine(Function):
    """Rows (M, D), weights (N, K) -> (N, D)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, assignment: Assignment) -> Tensor:
        ctx.assignment = assignment
        ctx.save_for_backward(rows, weights)
        return _sum_rows(rows, assignment.place_NK, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        (rows, weights), assignment = ctx.saved_tensors, ctx.assignment
        dout_MD = grads[0].index_select(0, assignment.tokens_M)
        dslots = torch.zeros(weights.numel() + 1, dtype=torch.float32, device=rows.device)
        dslots[assignment.order_M] = (dout_MD * rows).sum(-1, dtype=torch.float32)
        dweights = dslots[:-1].view(weights.shape[::-1]).t().to(weights.dtype)
        slot_weights_M = F.pad(weights.t().reshape(-1), (0, 1))[assignment.order_M]  # 0 for rows of nobody
        return dout_MD.mul_(slot_weights_M[:, None]), dweights, None


def _sum_rows(rows_MD: Tensor, place_NK: Tensor, weights_NK: Tensor | None = None) -> Tensor:
    """The weighted sum of the rows at `place`, one bag of K rows per token. The order of summation is the same in every
    run. Place M is a row of zeros."""
    if len(rows_MD) < place_NK.numel():
        rows_MD = torch.cat([rows_MD, rows_MD.new_zeros(1, rows_MD.shape[1])])
    return F.embedding_bag(place_NK, rows_MD, mode="sum", per_sample_weights=weights_NK)
