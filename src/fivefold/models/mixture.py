"""A mixture of experts: Llama with many feed-forward layers. Each token uses a few of them.

A router scores the experts for each token. The k best compute it, and their results are summed, weighted by score
(Shazeer et al., arXiv 1701.06538). Shared experts also compute every token (DeepSeekMoE, arXiv 2401.06066). Tokens are
sorted by expert, and one grouped matmul computes all experts.

Without a counterweight, a router sends most tokens to few experts. One remedy is a term of the loss (Switch, arXiv
2101.03961). The other is loss-free: a bias per expert, added to its score when experts are chosen, moves against the
load after each step (arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437).

Shapes: B batch, T tokens, N = B T, D model width, E experts, C chunks, K experts of a token, F width of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from fivefold.kernels import elementwise
from fivefold.kernels.mixture import assign, combine, dispatch, evened, grouped_linear
from fivefold.kernels.rounded import RoundedMatmuls
from fivefold.models.layers import RegionInput, RegionOutput, Sublayer, SwiGLU
from fivefold.models.section import ModelSection, known


class RouterStats:
    """Numbers exchanged between the trainer and one layer.

    scale: factor on the gradient of the loss; the router's own terms use it, too. sums: totals over the backward passes
    since it was None, fp64 (E + 4): slots of each expert, dropped slots, load-balance term, z term, number of passes.
    counts: False in the backward of an empty microbatch, which changes neither sums nor gradients.
    """

    def __init__(self) -> None:
        self.scale: float | Tensor = 1.0
        self.sums: Tensor | None = None
        self.counts = True

    def add(self, facts: Tensor) -> None:
        self.sums = facts.double() if self.sums is None else self.sums + facts


class _Attach(Function):
    """Identity in forward. In backward the router's loss gets its gradient, and the stats its facts: once per
    microbatch, even if forward is recomputed, or if this pipeline stage never sees the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, stats: RouterStats, facts: Tensor) -> Tensor:
        ctx.stats, ctx.facts = stats, facts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        if not ctx.stats.counts:
            return grads[0], torch.zeros((), device=ctx.facts.device), None, None
        ctx.stats.add(ctx.facts)
        scale = ctx.stats.scale
        if not isinstance(scale, Tensor):
            scale = torch.full((), scale, device=ctx.facts.device)
        return grads[0], scale, None, None


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

    def forward(
        self, rows_MD: Tensor, counts_CE: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """compute(rows sorted by expert, rows per expert) returns the results, row by row."""
        return compute(rows_MD, counts_CE[0])


class Router(nn.Module):
    """Scores and choice of experts, in fp32. `bias` (E) is a buffer; it exists only if it balances the load."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        experts = known(model.experts)
        self.per_token, self.normalize = known(model.experts_per_token), model.router_normalize
        self.sigmoid, self.scale = model.router_score == "sigmoid", model.router_scale
        self.groups, self.groups_per_token = model.expert_groups, model.groups_per_token
        self.weight = nn.Parameter(torch.empty(experts, model.dim))
        self.bias: Tensor | None
        self.register_buffer("bias", torch.zeros(experts) if model.balance == "bias" else None)

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The chosen experts (N, K), their weights (N, K), all scores as shares that sum to 1 (N, E), logits (N, E)."""
        logits = F.linear(x_ND.float(), self.weight.float())
        scores = shares = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        if self.sigmoid:
            shares = scores / scores.sum(-1, keepdim=True)
        ranked = scores.detach() if self.bias is None else scores.detach() + self.bias.float()
        if self.groups_per_token < self.groups:
            ranked = best_groups(ranked, self.groups, self.groups_per_token)
        chosen = ranked.topk(self.per_token, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.scale != 1:
            weights = weights * self.scale
        return chosen, weights, shares, logits


class Experts(Sublayer):
    """The routed experts: E SwiGLUs. Rows of each `gate_up`: F of the gate, then F of up. rounded: as in `Linear`."""

    rounded: RoundedMatmuls | None = None

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        experts, width = known(model.experts), known(model.expert_ffn_dim)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * width, model.dim))
        self.down = nn.Parameter(torch.empty(experts, model.dim, width))
        self.exchange = Exchange()

    def forward(self, rows_MD: Tensor, counts_CE: Tensor) -> Tensor:
        """Rows sorted by chunk and expert, and the number of rows of each expert in each chunk -> (M, D)."""
        return self.exchange(rows_MD, counts_CE, self.compute)

    def compute(self, rows_MD: Tensor, counts_E: Tensor) -> Tensor:
        return self.finish(grouped_linear(rows_MD, self.gate_up, counts_E, self.rounded), counts_E)

    def finish(self, product: Tensor, *tables: Tensor) -> Tensor:
        """Gate and up (M, 2F), counts (E) -> (M, D)."""
        return grouped_linear(elementwise.swiglu(product), self.down, tables[0], self.rounded)


class Mixture(nn.Module):
    """Router, routed experts, shared experts (one SwiGLU as wide as all of them).

    Under tensor parallelism each rank computes some features of every expert. One sum behind routed and shared experts
    makes the result whole. The router is whole. Under sequence parallelism ranks have tokens of their own, and whole
    experts.
    """

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.count, self.capacity_factor = known(model.experts), model.capacity_factor
        self.aux_weight = model.aux_loss_weight if model.balance == "aux" else 0.0
        self.z_weight = model.z_loss_weight
        self.router, self.total, self.experts = Router(model), Total(), Experts(model)
        width = (model.shared_experts or 0) * known(model.expert_ffn_dim)
        self.shared = SwiGLU(model.dim, width) if width else None
        self.enter, self.leave = RegionInput(), RegionOutput()
        self.stats = RouterStats()

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.flatten(0, 1)
        chosen, weights, shares, logits = self.router(x_ND)
        way = assign(chosen, self.count, self.capacity(len(x_ND)), self.experts.exchange.chunks)
        if self.experts.exchange.local:
            way = evened(way, x_ND.dtype)
        inside_ND = self.enter(x_ND)
        y_ND = combine(self.experts(dispatch(inside_ND, way), way.counts_CE), self.enter(weights), way)
        if self.shared is not None:
            y_ND = y_ND + self.shared(inside_ND)
        y_ND = self.leave(y_ND)
        if torch.is_grad_enabled() and self.training:
            with torch.set_grad_enabled(self.aux_weight > 0):
                aux = balance_loss(shares, self.total(way.chosen_E))
            with torch.set_grad_enabled(self.z_weight > 0):
                z = logits.logsumexp(-1).square().mean()
            with torch.no_grad():
                dropped = (way.chosen_E - way.counts_CE.sum(0)).clamp(min=0).sum()
                facts = torch.cat([way.chosen_E, torch.stack([dropped, aux, z, torch.ones_like(aux)])])
            losses = self.aux_weight * aux + self.z_weight * z
            y_ND = _Attach.apply(y_ND, losses, self.stats, facts)
        return y_ND.view_as(x_BTD)

    def capacity(self, tokens: int) -> int:
        """Most rows that an expert takes of this many tokens; 0: no limit. No rows are dropped outside training."""
        if not self.training or not self.capacity_factor:
            return 0
        return math.ceil(self.capacity_factor * tokens * self.router.per_token / self.count)


def best_groups(scores_NE: Tensor, groups: int, count: int) -> Tensor:
    """The scores in the `count` best groups of experts; those in the others become -inf. A group's score is the sum of
    its two best experts' scores (DeepSeek-V3, section 2.1.2)."""
    each_NGe = scores_NE.unflatten(-1, (groups, -1))
    best_NG = each_NGe.topk(2, dim=-1).values.sum(-1).topk(count, dim=-1).indices
    outside_NG = torch.ones_like(each_NGe[..., 0], dtype=torch.bool).scatter(-1, best_NG, False)
    return each_NGe.masked_fill(outside_NG[..., None], -math.inf).flatten(-2)


def balance_loss(shares_NE: Tensor, chosen_E: Tensor) -> Tensor:
    """E x the sum over experts of (share of slots that chose it) x (mean score): 1 at even load, E at worst. Only the
    scores have a gradient (arXiv 2101.03961, equation 4). chosen_E: slots of each expert."""
    share_E = chosen_E / chosen_E.sum()
    return shares_NE.shape[1] * (share_E * shares_NE.mean(0)).sum()
