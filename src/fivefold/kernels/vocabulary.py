"""Cross-entropy if this rank has some columns of the logits: the statistics that other ranks need, and the gradient
once the log-sum-exp over the whole vocabulary is known.

Legend: n rows (tokens), V columns on this rank, `first` the index of its first column in the whole vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.kernels import native, sizes
from fivefold.spread.regions import LOSS_STATISTICS


def vocabulary_statistics(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """Statistics of this rank's columns, (3, n) fp32: the largest logit, the sum of exp(logit - largest), and the
    target's logit, or 0 if another rank has it. logits (n, V), targets (n) int64 in the whole vocabulary, negative for
    "not counted"."""
    if native.usable(logits):
        out = torch.empty(LOSS_STATISTICS, len(logits), dtype=torch.float32)
        native.call("vocabulary_statistics", logits.dtype, logits, targets, out, *logits.shape, first)
        return out
    here, index = local_targets(targets, first, logits.shape[1])
    out = logits.new_empty(LOSS_STATISTICS, len(logits), dtype=torch.float32)
    for part in sizes.fp32_parts(*logits.shape):
        whole = logits[part].float()
        top = whole.amax(1)
        at_target = whole.gather(1, index[part, None])[:, 0] * here[part]
        out[:, part] = torch.stack([top, (whole - top[:, None]).exp_().sum(1), at_target])
        del whole  # before the next part's
    return out


def vocabulary_loss(statistics: Tensor) -> tuple[Tensor, Tensor]:
    """Statistics of all ranks (parts, 3, n) -> log-sum-exp (n) and cross-entropy (n) of each row."""
    top, total, at_target = statistics.unbind(1)
    largest = top.amax(0)
    lse = (total * (top - largest).exp()).sum(0).log() + largest
    return lse, lse - at_target.sum(0)


def vocabulary_gradient(logits: Tensor, targets: Tensor, lse: Tensor, first: int, scale: Tensor) -> Tensor:
    """scale * (softmax - onehot) of this rank's columns, zero where the target is negative. It overwrites
    the logits."""
    if native.usable(logits):
        native.call(
            "vocabulary_gradient", logits.dtype, logits, targets, lse.contiguous(), scale, *logits.shape, first
        )  # fmt: skip
        return logits
    here, index = local_targets(targets, first, logits.shape[1])
    for part in sizes.fp32_parts(*logits.shape):
        gradient = (logits[part].float() - lse[part, None]).exp_()
        gradient.scatter_add_(1, index[part, None], -here[part].float()[:, None])
        logits[part] = gradient.mul_((targets[part] >= 0)[:, None] * scale)
        del gradient  # before the next part's
    return logits


def local_targets(targets: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """(True where a target is on this rank, its column or 0)."""
    here = (targets >= first) & (targets < first + columns)
    return here, (targets - first) * here
