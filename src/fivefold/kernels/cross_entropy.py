"""Cross-entropy from logits whose columns several ranks share, in two passes over a chunk: the statistics that other
ranks need, and the gradient once the log-sum-exp over the whole vocabulary is known. GPUs compute any loss so. PyTorch
compiles each pass for them. A trace sees each as one operator.

Legend: n rows (tokens), V columns on this rank, `first` the index of its first column in the whole vocabulary.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from fivefold.kernels import native, sizes
from fivefold.kernels.hashing import chunk_on, hash_
from fivefold.precision.card import MOST_IDS
from fivefold.sharding.units import LOSS_STATISTICS

Keys = tuple[int, int]
"""Of the hash that draws (hashing.py)."""


def drawn(logits: Tensor, tokens: Tensor, key: Keys, first: int = 0) -> tuple[Tensor, Tensor]:
    """The largest logit plus Gumbel noise of each row, (n) fp32, and its number in the vocabulary, (n) int64. Over the
    whole vocabulary that number is a draw from the softmax (Gumbel, 1954; Maddison et al., arXiv 1411.0030).

    logits (n, V): columns from `first` on. tokens (n) int64: the noise depends on (key, token, column) alone, so every
    layout draws the same labels, unless rounding decides between two sums that are almost equal.
    """
    best, labels = logits.new_empty(len(logits), dtype=torch.float32), torch.empty_like(tokens)
    columns = torch.arange(first, first + logits.shape[1], device=logits.device)
    rows = max(1, chunk_on(logits.device) // max(1, logits.shape[1]))
    for start in range(0, len(logits), rows):
        part = slice(start, start + rows)
        bits = hash_(tokens[part, None].clamp(min=0) * MOST_IDS + columns, *key)
        uniform = (bits >> 32).bitwise_and_(0xFFFFFFFF).float().add_(0.5).mul_(2.0**-32)  # (0, 1]
        noise = uniform.neg_().log1p_().neg_().log_()  # of an exponential variable: minus Gumbel's
        best[part], index = (logits[part].float() - noise).max(1)
        labels[part] = index + first
    return best, labels


def cap_(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap) in place of the logits (Gemma 2, arXiv 2408.00118). Returns the derivative."""
    logits.div_(cap).tanh_()
    slope = torch.addcmul(logits.new_ones(()), logits, logits, value=-1)
    logits.mul_(cap)
    return slope


def add_z_gradient(
    gradient: Tensor, index: Tensor, here: Tensor, lse: Tensor, scale: Tensor, z_loss: float
) -> Tensor:
    """scale * (softmax * (1 + 2 z_loss lse) - onehot), in place of scale * (softmax - onehot) (n, V). index: (n, 1)
    columns of the targets that are `here` (n). lse: (n), 0 where no target counts."""
    more = 2 * z_loss * lse
    gradient.mul_((1 + more)[:, None])
    return gradient.scatter_add_(1, index, (scale * more * here)[:, None].to(gradient.dtype))


def vocabulary_statistics(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """Statistics of this rank's columns, (3, n) fp32: the largest logit, the sum of exp(logit - largest), and the
    target's logit, or 0 if another rank has it. logits (n, V), targets (n) int64 in the whole vocabulary, negative for
    "not counted"."""
    if native.usable(logits):
        out = torch.empty(LOSS_STATISTICS, len(logits), dtype=torch.float32)
        native.call("vocabulary_statistics", logits.dtype, logits, targets, out, *logits.shape, first)
        return out
    return (_statistics_on_gpu if logits.device.type == "cuda" else _statistics)(logits, targets, first)


def _statistics(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """Of all rows at once if it is compiled. Else parts of them have copies in fp32."""
    if torch.compiler.is_compiling():
        return _of_rows(logits, targets, first)
    out = logits.new_empty(LOSS_STATISTICS, len(logits), dtype=torch.float32)
    for part in sizes.fp32_parts(*logits.shape):
        out[:, part] = _of_rows(logits[part], targets[part], first)
    return out


def _of_rows(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    here, index = local_targets(targets, first, logits.shape[1])
    whole = logits.float()
    top = whole.amax(1, keepdim=True)
    total = (whole - top).exp_().sum(1, keepdim=True)
    return torch.stack([top[:, 0], total[:, 0], whole.gather(1, index[:, None])[:, 0] * here])


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
    (_gradient_on_gpu if logits.device.type == "cuda" else _gradient)(logits, targets, lse, first, scale)
    return logits


def _gradient(logits: Tensor, targets: Tensor, lse: Tensor, first: int, scale: Tensor) -> None:
    """As in `_statistics`."""
    here, index = local_targets(targets, first, logits.shape[1])
    factor = (targets >= 0)[:, None] * scale
    if torch.compiler.is_compiling():  # it compares on its way, and would scatter in a pass of its own
        columns = torch.arange(logits.shape[1], device=logits.device)
        target = (here[:, None] & (columns == index[:, None])).float()
        logits.copy_(((logits.float() - lse[:, None]).exp() - target) * factor)
        return
    for part in sizes.fp32_parts(*logits.shape):
        gradient = (logits[part].float() - lse[part, None]).exp_()
        gradient.scatter_add_(1, index[part, None], -here[part].float()[:, None])
        logits[part] = gradient.mul_(factor[part])
        del gradient  # before the next part's


compiled: Any = cache(torch.compile)
"""`torch.compile` itself takes milliseconds, also of what is compiled."""


@custom_op("fivefold::vocabulary_statistics", mutates_args=())
def _statistics_on_gpu(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """`_statistics`, compiled: one pass over the logits. A trace sees one operator."""
    return compiled(_statistics)(logits, targets, first)


@_statistics_on_gpu.register_fake
def _(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    return logits.new_empty(LOSS_STATISTICS, len(logits), dtype=torch.float32)


@custom_op("fivefold::vocabulary_gradient", mutates_args=("logits",))
def _gradient_on_gpu(logits: Tensor, targets: Tensor, lse: Tensor, first: int, scale: Tensor) -> None:
    """`_gradient`, compiled: one pass, too."""
    compiled(_gradient)(logits, targets, lse, first, scale)


@_gradient_on_gpu.register_fake
def _(logits: Tensor, targets: Tensor, lse: Tensor, first: int, scale: Tensor) -> None: ...


def local_targets(targets: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """(True where a target is on this rank, its column or 0)."""
    here = (targets >= first) & (targets < first + columns)
    return here, (targets - first) * here
