"""gpt-oss (arXiv 2508.10925): a mixture of experts with biases, clamped gates, a sink for each head of attention, and
sliding windows in every other block.

Shapes: N tokens, D model width, E experts, K experts of a token, F width of an expert, M rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold.kernels.elementwise import clamped_swiglu
from fivefold.kernels.matmul import wide
from fivefold.models import mixture
from fivefold.models.moe import module as moe
from fivefold.models.section import ModelSection

GAIN, LIMIT = 1.702, 7.0
"""Of the gate (`clamped_swiglu`)."""


class Router(mixture.Router):
    """With a bias of the logits, which is trained as the weight is."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__(model)
        self.logit_bias = nn.Parameter(torch.zeros(len(self.weight)))

    def logits(self, x_ND: Tensor) -> Tensor:
        return super().logits(x_ND) + self.logit_bias.float()


class Experts(mixture.Experts):
    """With biases of gate and up, and a clamped gate."""

    gate = staticmethod(partial(clamped_swiglu, gain=GAIN, limit=LIMIT))

    def __init__(self, model: ModelSection) -> None:
        super().__init__(model)
        self.gate_up_bias = nn.Parameter(torch.zeros(self.gate_up.shape[:2]))

    def finish(self, product: Tensor, *tables: Tensor) -> Tensor:
        return super().finish(_Biased.apply(product, self.gate_up_bias, tables[0]), *tables)


class Mixture(mixture.Mixture):
    """With biases of the experts' results. They are weighted by token, on the rank that has it: no rank's rows need
    them, and a tensor-parallel sum would count them several times."""

    router_type, experts_type = Router, Experts

    def __init__(self, model: ModelSection, gated: bool = False) -> None:
        super().__init__(model, gated)
        self.down_bias = nn.Parameter(torch.zeros(self.count, model.dim))

    def completed(
        self, y_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor, way: mixture.Assignment
    ) -> Tensor:
        if way.drops:
            weights_NK = weights_NK.masked_fill(way.place_NK == len(way.order_M), 0.0)
        weights_NE = weights_NK.new_zeros(len(y_ND), self.count).scatter(1, chosen_NK, weights_NK)
        return y_ND + weights_NE.to(y_ND.dtype) @ self.down_bias


class _Biased(Function):
    """Rows (M, F) sorted by expert plus their expert's bias (E, F). counts (E): rows of each. Backward sums the rows of
    an expert in a grouped product with ones: the same bits in every run."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(counts)
        experts = torch.arange(len(counts), device=rows.device)
        return rows + bias[experts.repeat_interleave(counts, output_size=len(rows))]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        (counts,), drows = ctx.saved_tensors, grads[0].contiguous()
        ones_M8 = drows.new_ones(len(drows), 8)  # as many as whole 16 bytes need
        ends = counts.cumsum(0).to(torch.int32)
        sums_E8F = mixture.grouped_product(wide(ones_M8).t(), wide(drows), ends)
        return drows, sums_E8F[:, 0].to(drows.dtype), None


class Model(moe.Model):
    """Llama with gpt-oss's attention and mixture."""

    mixture_type = Mixture
