"""The sum of the rows that experts have computed for a token, and its gradients, without autograd.

Legend: N tokens, K rows of a token, M rows in all, D model. Slot s of token n has index s N + n; slot N K is nobody's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def sum_rows(rows_MD: Tensor, place_NK: Tensor, weights_NK: Tensor | None, drops: bool) -> Tensor:
    """The weighted sum of the rows of each token (N, D): one bag of K rows per token, summed in the same order in every
    run. drops: some places may be M, which counts as zero."""
    if drops:
        rows_MD = torch.cat([rows_MD, rows_MD.new_zeros(1, rows_MD.shape[1])])
    return F.embedding_bag(place_NK, rows_MD, mode="sum", per_sample_weights=weights_NK)


def spread(dout_ND: Tensor, rows_MD: Tensor, weights_NK: Tensor, order_M: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of rows and weights, given that of the sum. order: the slot of each row."""
    dout_MD = dout_ND.index_select(0, order_M % len(dout_ND))
    dslots = torch.zeros(weights_NK.numel() + 1, dtype=torch.float32, device=rows_MD.device)
    dslots[order_M] = (dout_MD * rows_MD).sum(-1, dtype=torch.float32)
    dweights = dslots[:-1].view(weights_NK.shape[::-1]).t().to(weights_NK.dtype)
    slot_weights_M = F.pad(weights_NK.t().reshape(-1), (0, 1))[order_M]  # 0 for rows of nobody
    return dout_MD.mul_(slot_weights_M[:, None]), dweights
