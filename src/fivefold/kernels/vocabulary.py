"""Cross-entropy of logits of which only a part of the vocabulary is here: what others must know of it, and its
gradient once the log-sum-exp over the whole vocabulary is known.

Legend: n rows (tokens), V columns here, `first` the number of the first of them in the whole vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.kernels import native


def vocabulary_statistics(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """(3, n) fp32: the largest logit here, the sum of exp(logit - largest), the target's logit or 0 where it is not
    here. logits (n, V), targets (n) int64 in the whole vocabulary, negative for "not counted"."""
    if native.usable(logits):
        out = torch.empty(3, len(logits), dtype=torch.float32)
        native.call("vocabulary_statistics", logits.dtype, logits, targets, out, *logits.shape, first)
        return out
    whole = logits.float()
    top = whole.amax(1)
    here, index = _local(targets, first, logits.shape[1])
    at_target = whole.gather(1, index[:, None])[:, 0] * here
    return torch.stack([top, (whole - top[:, None]).exp().sum(1), at_target])


def vocabulary_loss(statistics: Tensor) -> tuple[Tensor, Tensor]:
    """The statistics of all parts, (parts, 3, n) -> log-sum-exp (n) and cross-entropy (n) of each row."""
    top, total, at_target = statistics.unbind(1)
    largest = top.amax(0)
    lse = (total * (top - largest).exp()).sum(0).log() + largest
    return lse, lse - at_target.sum(0)


def vocabulary_gradient(logits: Tensor, targets: Tensor, lse: Tensor, first: int, scale: float) -> Tensor:
    """scale * (softmax - onehot) of the columns here, over the logits where it can; zeros where the target is
    negative."""
    if native.usable(logits):
        native.call(
            "vocabulary_gradient", logits.dtype, logits, targets, lse.contiguous(), *logits.shape, first, scale
        )  # fmt: skip
        return logits
    here, index = _local(targets, first, logits.shape[1])
    gradient = (logits.float() - lse[:, None]).exp()
    gradient.scatter_add_(1, index[:, None], -here.float()[:, None])
    return gradient.mul_((targets >= 0)[:, None] * scale).to(logits.dtype)


def _local(targets: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Which targets are here, and their columns (0 for the others)."""
    here = (targets >= first) & (targets < first + columns)
    return here, (targets - first) * here
