"""A mixture of experts: Llama with many feed-forward layers. Each token uses a few of them.

A router scores the experts for each token. The k best compute it, and their results are summed, weighted by score
(Shazeer et al., arXiv 1701.06538). Shared experts also compute every token (DeepSeekMoE, arXiv 2401.06066). Tokens are
sorted by expert, and one grouped matmul computes all experts.

Without a counterweight, a router sends most tokens to few experts. One remedy is a term of the loss (Switch, arXiv
2101.03961). The other is loss-free: a bias per expert, added to its score when experts are chosen, moves against the
load after each step (arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437).

Last the computation after the router, in functions of tensors: tokens are sorted by expert, all experts computed in one
grouped matmul, and the results returned to their tokens.

Shapes: B batch, T tokens, N = B T, D model width, E experts, C chunks, K experts of a token, F width of an expert, M
rows (a token once for each of its experts, less those dropped).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.library import custom_op
from torch.nn import functional as F

from fivefold.kernels import elementwise, native
from fivefold.kernels.gpu import registry
from fivefold.kernels.matmul import wide, widened
from fivefold.kernels.rounded import RoundedMatmuls, round_tiles
from fivefold.models.layers import RegionInput, RegionOutput, Sublayer, SwiGLU
from fivefold.models.section import ModelSection, expert_capacity, known
from fivefold.precision.formats import Format
from fivefold.precision.fp8 import BLOCK

Compute = Callable[[Tensor, Tensor], Tensor]
LEAST = 1e-20  # on sums of scores that divide, as in DeepSeek-V3: in fp32 the sigmoid of -104 is 0


class RouterStats:
    """Numbers exchanged between the trainer and one layer.

    factors: of this microbatch's router terms, the same as on the gradient of its loss, and of its facts: 1, or 0 for
    an empty microbatch. Both fp32, (2). facts: a leaf whose gradient adds the facts up over backward passes, also of
    compiled code.
    """

    def __init__(self) -> None:
        self.factors: Tensor | None = None
        self.facts: Tensor | None = None

    def start(self, experts: int, factors: Tensor) -> None:
        """A step begins: nothing is counted yet."""
        if self.facts is None:
            self.facts = factors.new_zeros(experts + 4, dtype=torch.float64).requires_grad_()
        self.facts.grad, self.factors = None, factors

    @property
    def sums(self) -> Tensor | None:
        """Totals over the backward passes of this step, fp64 (E + 4): slots of each expert, dropped slots, load-balance
        term, z term, number of passes. None: there was no pass."""
        return None if self.facts is None else self.facts.grad


class _Attach(Function):
    """Identity in forward. In backward the router's loss gets its gradient, and the stats their facts: once per
    microbatch, even if forward is recomputed, or if this pipeline stage never sees the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, sums: Tensor, facts: Tensor, factors: Tensor) -> Tensor:
        # Not saved: recomputation would find those of another microbatch.
        ctx.facts, ctx.factors = facts, factors
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        scale, counted = ctx.factors.unbind()
        return grads[0], scale, ctx.facts.double().where(counted > 0, 0.0), None, None


class Total(nn.Module):
    """Slots of each expert, over the tokens that the load-balance term covers. No parameters.

    If a sequence is cut between ranks, another module replaces it and sums their counts.
    """

    def forward(self, counts_E: Tensor) -> Tensor:
        return counts_E


class Exchange(nn.Module):
    """Computes rows of experts on this rank. No parameters. Expert parallelism replaces it by a module that sends the
    rows to the ranks with the experts, and the results back, in `chunks` parts."""

    chunks, local = 1, True

    def begin(self, x_ND: Tensor, way: Assignment, how: RoundedMatmuls | None = None) -> tuple[Any, Any]:
        """Makes the rows of tokens, and lets them leave beside what is computed before `forward`. Returns the rows, or
        what autograd sees in their place, and what `forward` needs besides. how: rounds what travels to experts: rows,
        and the gradients of results."""
        return dispatch(x_ND, way), (way.counts_CE[0], how)

    def beyond(self, counts_CE: Tensor, rows: int) -> Tensor | int:
        """Number of this rank's rows that are lost, because there was no room for them. rows: that it has."""
        return 0

    def forward(self, rows_MD: Any, compute: Compute, begun: Any) -> Tensor:
        """compute(rows sorted by expert, rows per expert) returns the results, row by row. rows, begun: by `begin`."""
        counts_E, how = begun
        if how is None:
            return compute(rows_MD, counts_E)
        results = compute(_Travel.apply(rows_MD, how.inputs, None), counts_E)
        return _Travel.apply(results, None, how.gradients)


class Router(nn.Module):
    """Scores and choice of experts, in fp32. `bias` (E) and `load` (E), each expert's share of the last step's slots,
    are buffers. They exist only if they balance the load."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        experts = known(model.experts)
        self.per_token, self.normalize = known(model.experts_per_token), model.router_normalize
        self.sigmoid, self.scale = model.router_score == "sigmoid", model.router_scale
        self.groups, self.groups_per_token = model.expert_groups, model.groups_per_token
        self.weight = nn.Parameter(torch.empty(experts, model.dim))
        self.bias: Tensor | None
        self.register_buffer("bias", torch.zeros(experts) if model.balance == "bias" else None)
        self.load: Tensor | None
        self.register_buffer("load", torch.zeros(experts) if model.balance_scope == "batch" else None)

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The chosen experts (N, K), their weights (N, K), all scores as shares that sum to 1 (N, E), logits (N, E)."""
        logits = self.logits(x_ND)
        scores = shares = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        if self.sigmoid:
            shares = scores / (scores.sum(-1, keepdim=True) + LEAST)
        ranked = scores.detach() if self.bias is None else scores.detach() + self.bias.float()
        if self.groups_per_token < self.groups:
            ranked = best_groups(ranked, self.groups, self.groups_per_token)
        chosen = ranked.topk(self.per_token, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + LEAST)
        if self.scale != 1:
            weights = weights * self.scale
        return chosen, weights, shares, logits

    def logits(self, x_ND: Tensor) -> Tensor:
        return F.linear(x_ND.float(), self.weight.float())


class Experts(Sublayer):
    """The routed experts: E SwiGLUs. Rows of each `gate_up`: F of the gate, then F of up. rounded: as in `Linear`.
    gate: from gate and up to the input of `down`."""

    rounded: RoundedMatmuls | None = None
    gate: Callable[[Tensor], Tensor] = staticmethod(elementwise.swiglu)

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        experts, width = known(model.experts), known(model.expert_ffn_dim)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * width, model.dim))
        self.down = nn.Parameter(torch.empty(experts, model.dim, width))
        self.exchange = Exchange()

    def forward(self, rows_MD: Any, begun: Any) -> Tensor:
        """What `Exchange.begin` returned -> (M, D), sorted by chunk and expert."""
        return self.exchange(rows_MD, self.compute, begun)

    @property
    def travelling(self) -> RoundedMatmuls | None:
        """How rows are rounded on their way, if they are."""
        return self.rounded if self.rounded and self.rounded.dispatch else None

    def compute(self, rows_MD: Tensor, counts_E: Tensor) -> Tensor:
        how = self.rounded and self.rounded.of(0)
        return self.finish(grouped_linear(rows_MD, self.gate_up, counts_E, how), counts_E)

    def finish(self, product: Tensor, *tables: Tensor) -> Tensor:
        """Gate and up (M, 2F), counts (E) -> (M, D)."""
        how = self.rounded and self.rounded.of(1)
        return grouped_linear(self.gate(product), self.down, tables[0], how)


class Mixture(nn.Module):
    """Router, routed experts, shared experts (one SwiGLU as wide as all of them; gated: times a sigmoid of the input).

    Under tensor parallelism each rank computes some features of every expert. One sum behind routed and shared experts
    makes the result whole. The router is whole. Under sequence parallelism ranks have tokens of their own, and whole
    experts.
    """

    router_type, experts_type = Router, Experts

    def __init__(self, model: ModelSection, gated: bool = False) -> None:
        super().__init__()
        self.count, self.capacity_factor = known(model.experts), model.capacity_factor
        self.aux_weight = model.aux_loss_weight if model.balance == "aux" else 0.0
        self.z_weight = model.z_loss_weight
        self.router, self.total, self.experts = self.router_type(model), Total(), self.experts_type(model)
        width = (model.shared_experts or 0) * known(model.expert_ffn_dim)
        self.shared = SwiGLU(model.dim, width) if width else None
        self.shared_gate_vectors = nn.Parameter(torch.empty(1, model.dim)) if width and gated else None
        self.enter, self.leave = RegionInput(), RegionOutput()
        self.stats = RouterStats()

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.flatten(0, 1)
        chosen, weights, shares, logits = self.router(x_ND)
        way = assign(chosen, self.count, self.capacity(len(x_ND)), self.experts.exchange.chunks)
        if self.experts.exchange.local:
            way = evened(way, x_ND.dtype)
        inside_ND = self.enter(x_ND)
        rows_MD, begun = self.experts.exchange.begin(inside_ND, way, self.experts.travelling)
        # Between the two, rows travel. The plan has this order, too (`models.work.mixture`).
        shared_ND = None if self.shared is None else self.share(inside_ND)
        rows_MD = self.experts(rows_MD, begun)
        y_ND = combine(rows_MD, self.enter(weights), way)
        if shared_ND is not None:
            y_ND = y_ND + shared_ND
        y_ND = self.completed(self.leave(y_ND), chosen, weights, way)
        if torch.is_grad_enabled() and self.training:
            y_ND = self.attach(y_ND, shares, logits, way)
        return y_ND.view_as(x_BTD)

    def share(self, x_ND: Tensor) -> Tensor:
        """What the shared experts add; under tensor parallelism a partial sum."""
        assert self.shared is not None
        shared_ND, gate_1D = self.shared(x_ND), self.shared_gate_vectors
        return shared_ND if gate_1D is None else shared_ND * (x_ND @ gate_1D.t()).sigmoid()

    def completed(self, y_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor, way: Assignment) -> Tensor:
        """Adds what each rank computes of its own tokens, whole."""
        return y_ND

    def attach(self, y_ND: Tensor, shares_NE: Tensor, logits_NE: Tensor, way: Assignment) -> Tensor:
        """y, whose backward brings the router's own terms and facts."""
        with nullcontext() if self.aux_weight > 0 else torch.no_grad():
            load = self.router.load
            aux = balance_loss(shares_NE, self.total(way.chosen_E) if load is None else load)
        with nullcontext() if self.z_weight > 0 else torch.no_grad():
            z = logits_NE.logsumexp(-1).square().mean()
        with torch.no_grad():
            dropped = (way.chosen_E - way.counts_CE.sum(0)).clamp(min=0).sum()
            dropped = dropped + self.experts.exchange.beyond(way.counts_CE, len(way.order_M))
            facts = torch.cat([way.chosen_E, torch.stack([dropped, aux, z, torch.ones_like(aux)])])
        losses = self.aux_weight * aux + self.z_weight * z
        stats = self.stats
        if stats.facts is None:
            stats.start(self.count, torch.ones(2, device=y_ND.device))
        return _Attach.apply(y_ND, losses, stats.facts, facts, stats.factors)

    def capacity(self, tokens: int) -> int:
        """Most rows that an expert takes of this many tokens; 0: no limit. No rows are dropped outside training."""
        if not self.training:
            return 0
        return expert_capacity(self.capacity_factor, tokens, self.router.per_token, self.count)


def best_groups(scores_NE: Tensor, groups: int, count: int) -> Tensor:
    """The scores in the `count` best groups of experts; those in the others become -inf. A group's score is the sum of
    its two best experts' scores (DeepSeek-V3, section 2.1.2)."""
    each_NGe = scores_NE.unflatten(-1, (groups, -1))
    best_NG = each_NGe.topk(2, dim=-1).values.sum(-1).topk(count, dim=-1).indices
    outside_NG = torch.ones_like(each_NGe[..., 0], dtype=torch.bool).scatter(-1, best_NG, False)
    return each_NGe.masked_fill(outside_NG[..., None], -math.inf).flatten(-2)


def balance_loss(shares_NE: Tensor, chosen_E: Tensor) -> Tensor:
    """E x the sum over experts of (share of slots that chose it) x (mean score): 1 at even load, E at worst. Only the
    scores have a gradient (arXiv 2101.03961, equation 4). chosen_E: slots of each expert; if there are none it is 0."""
    share_E = chosen_E / chosen_E.sum().clamp(min=torch.finfo(torch.float32).tiny)
    return shares_NE.shape[1] * (share_E * shares_NE.mean(0)).sum()


class Assignment(NamedTuple):
    """The assignment of tokens to rows. Slot s of token n has index s N + n, so first choices come before second ones.

    order_M: the slot of each row; rows are sorted by chunk, then by expert, then by slot. Slot N K is nobody's: such a
    row fills up an expert's (`evened`). place_NK: the row of each slot, or M if it is dropped. counts_CE: rows of each
    expert in each chunk. chosen_E: slots of each expert, including dropped ones. drops: some may be.
    """

    order_M: Tensor
    place_NK: Tensor
    counts_CE: Tensor
    chosen_E: Tensor
    drops: bool = False

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
    if capacity and (slots.is_cuda or torch.compiler.is_compiling()):
        return filled(chosen_NK, order, chosen, capacity, chunks)
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
    place_NK = place.view(chosen_NK.shape[::-1]).t().contiguous()
    return Assignment(order, place_NK, counts_CE, chosen, len(order) < len(slots))


def filled(
    chosen_NK: Tensor, order_S: Tensor, chosen_E: Tensor, capacity: int, chunks: int = 1
) -> Assignment:
    """As `assign`, but every expert has `capacity` rows; those that it lacks are nobody's. So no shape depends on data:
    a GPU need not wait, and the compiler has no break. order_S: slots sorted by expert. chosen_E: slots of each."""
    expert_S, rows = chosen_NK.t().reshape(-1)[order_S], len(chosen_E) * capacity
    nth_S, edges = _nth(expert_S, chosen_E), [capacity * i // chunks for i in range(chunks + 1)]
    places, E = torch.arange(rows, device=order_S.device), len(chosen_E)
    # Where each expert's rows stand, and last the place of dropped slots.
    chunked = [places[E * a : E * b].view(E, b - a) for a, b in pairwise(edges)]
    place_R = F.pad(torch.cat(chunked, 1).flatten(), (0, 1), value=rows)
    placed_S = place_R[torch.where(nth_S < capacity, expert_S * capacity + nth_S, rows)]
    order, place = order_S.new_full((rows + 1,), len(order_S)), torch.empty_like(order_S)
    order[placed_S], place[order_S] = order_S, placed_S
    counts_C = (torch.arange(chunks + 1, device=order_S.device) * capacity // chunks).diff()
    place_NK = place.view(chosen_NK.shape[::-1]).t().contiguous()
    counts_CE = counts_C[:, None].expand(-1, len(chosen_E))
    return Assignment(order[:-1], place_NK, counts_CE, chosen_E, drops=True)


def evened(way: Assignment, dtype: torch.dtype) -> Assignment:
    """Adds filler rows behind those of each expert, up to a multiple of a power of 2 that is at most an eighth of the
    mean. This happens in bf16 on CPUs only, where no slot was dropped; elsewhere the assignment stays as it is. There
    are no chunks. In traces slots are shared evenly.

    On CPUs oneDNN compiles a bf16 matmul anew for each number of rows, which takes several times as long as the matmul.
    The filler rows take 1/16 of the experts' time."""
    counts_E = way.counts_CE[0]
    if dtype != torch.bfloat16 or counts_E.device.type != "cpu" or way.drops:
        return way
    slots, experts = way.place_NK.numel(), len(counts_E)
    part = 1 << max(1, slots // (8 * experts)).bit_length() - 1
    if part == 1:
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
    if how is not None or widened(rows_MD, weight_EFD) or _untraced(rows_MD):
        return _Grouped.apply(rows_MD, weight_EFD, offsets, how)
    return F.grouped_mm(rows_MD, weight_EFD.transpose(1, 2), offs=offsets)


class _Travel(Function):
    """Rows (M, D) as they arrive if they travel in a format, in forward and in backward; None: unchanged."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Format | None, back: Format | None) -> Tensor:
        ctx.back = back
        return rows.view_as(rows) if there is None else round_tiles(rows.contiguous(), 1, BLOCK, there)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        dy, back = grads[0], ctx.back
        return dy if back is None else round_tiles(dy.contiguous(), 1, BLOCK, back), None, None


def _untraced(rows: Tensor) -> bool:
    """True if PyTorch's compiler cannot trace PyTorch's own grouped product of these: it knows bf16 only."""
    return torch.compiler.is_compiling() and rows.dtype != torch.bfloat16


def grouped_product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """The grouped product of matrices, of which one or both are cut at `ends`, without autograd."""
    return torch.ops.fivefold.grouped_product(a, b, ends) if _untraced(a) else F.grouped_mm(a, b, offs=ends)


@custom_op("fivefold::grouped_product", mutates_args=())
def _grouped_product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(a, b, offs=ends)


@_grouped_product.register_fake
def _(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    groups = ends.shape if a.dim() == b.dim() == 2 else ()
    return a.new_empty(*groups, a.shape[-2], b.shape[-1])


class _Grouped(Function):
    """Rows (M, D), weights (E, F, D) -> (M, F). Backward converts the factors again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor, how: RoundedMatmuls | None) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        ctx.how = how
        if how is not None:
            return how.grouped(rows, weight, ends)
        return grouped_product(wide(rows), wide(weight).transpose(1, 2), ends).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        (rows, weight, ends), dy, how = ctx.saved_tensors, grads[0].contiguous(), ctx.how
        if how is None:
            drows = grouped_product(wide(dy), wide(weight), ends).to(dy.dtype)
            return drows, grouped_product(wide(dy).t(), wide(rows), ends).to(dy.dtype), None, None
        dy = how.both(dy)
        drows = how.grouped_input_gradient(dy, weight, ends)
        return drows, how.grouped_weight_gradient(dy, rows, ends), None, None


class _Dispatch(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, assignment: Assignment) -> Tensor:
        ctx.assignment = assignment
        return x.index_select(0, assignment.tokens_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        drows, way = grads[0], ctx.assignment
        return _summing(drows).sum_rows(drows, way.place_NK, None, way.drops), None


class _Combine(Function):
    """Rows (M, D), weights (N, K) -> (N, D)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, assignment: Assignment) -> Tensor:
        ctx.assignment = assignment
        ctx.save_for_backward(rows, weights)
        return _summing(rows).sum_rows(rows, assignment.place_NK, weights, assignment.drops)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        rows, weights = ctx.saved_tensors
        return *_summing(rows).spread(grads[0], rows, weights, ctx.assignment.order_M), None


def _summing(rows: Tensor) -> Any:
    """The module that sums rows and makes their gradients here."""
    if not native.in_triton(registry.COMBINE, rows):
        return elementwise
    from fivefold.kernels.gpu import combine  # which imports Triton

    return combine
