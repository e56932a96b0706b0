"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): blocks behind the model's last one that learn to
predict further tokens, in training only.

Module k = 1, ..., D has a block of its own, and the model's embedding and output layer. At position t it computes from
what the output layer read at depth k - 1, which knows the tokens up to t + k - 1, and the embedding of token t + k. It
predicts token t + k + 1. The order of both in the projection, and that a depth's result is normed before the next depth
reads it, are those of the published weights' files and of programs that generate with them.

Shapes: B batch, T tokens, D modules; elsewhere D model width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fivefold.models.layers import Linear, RMSNorm
from fivefold.models.section import ModelSection, known

NOT_COUNTED = -100


class Further(NamedTuple):
    """What a microbatch has for the modules. tokens, targets: of each depth at each position, (B, D, T). counts:
    targets that count in whole sequences, (1 + D), the main ones first. weight: that of the microbatch."""

    tokens: Tensor
    targets: Tensor
    counts: Tensor
    weight: float = 1.0

    def at(self, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens and targets (B, T) of a depth, and its targets relative to the main ones."""
        share = self.counts[depth + 1] / self.counts[0].clamp(min=1)
        return self.tokens[:, depth], self.targets[:, depth], share


def further(inputs_BT: Tensor, targets_BT: Tensor, first_BT: Tensor | None, depth: int) -> Further:
    """Shifts whole sequences by 1, ..., `depth` tokens. Targets beyond the end of a sequence, or of the document
    (first_BT: the column at which that of each token begins), do not count."""
    T, tokens, targets = inputs_BT.shape[1], [], []
    for k in range(1, depth + 1):
        target = targets_BT[:, k:]
        if first_BT is not None:
            target = target.masked_fill(first_BT[:, k:] != first_BT[:, : T - k], NOT_COUNTED)
        tokens.append(F.pad(inputs_BT[:, k:], (0, k)))
        targets.append(F.pad(target, (0, k), value=NOT_COUNTED))
    tokens_BDT, targets_BDT = torch.stack(tokens, 1), torch.stack(targets, 1)
    counts = [(targets_BT >= 0).sum(), *(targets_BDT >= 0).sum((0, 2))]
    return Further(tokens_BDT, targets_BDT, torch.stack(counts))


class Ahead(nn.Module):
    """What a block of multi-token prediction has besides. norm: of the block's result."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        D, eps = model.dim, known(model.norm_eps)
        self.token_norm, self.hidden_norm = RMSNorm(D, eps), RMSNorm(D, eps)
        self.project = Linear(2 * D, D, bias=False)
        self.norm = RMSNorm(D, eps)

    def forward(self, y_BTD: Tensor, tokens_BTD: Tensor) -> Tensor:
        """The block's input. y: what the output layer read one depth before. tokens: embedded."""
        return self.project(torch.cat((self.token_norm(tokens_BTD), self.hidden_norm(y_BTD)), dim=-1))


def loss_with_further(
    model: Any,
    x_BTD: Tensor,
    targets_BT: Tensor,
    given: Further,
    positions_T: Tensor,
    *tables: Tensor,
    **apart: Any,
) -> Tensor:
    """The main loss, whose backward also brings the gradients of the modules' mean loss, by its weight. Their loss,
    relative to the number of main targets as in the paper, is added to the model's `mtp_loss`. model: a
    `models.llama.module.Model`. x: the result of its last main block."""
    y_BTD, losses = model.norm(x_BTD), []
    loss = model.predict(y_BTD, targets_BT)
    modules = [block for block in model.blocks.values() if block.ahead is not None]
    for depth, block in enumerate(modules):
        tokens_BT, further_BT, share = given.at(depth)
        y_BTD = block(y_BTD, *tables, tokens=model.begin(tokens_BT, positions_T), **apart)
        losses.append(share * model.predict(y_BTD, further_BT))
    mean = torch.stack(losses).mean()
    model.mtp_loss = model.mtp_loss + given.weight * mean.detach()
    return loss + model.section.mtp_weight * (mean - mean.detach())
