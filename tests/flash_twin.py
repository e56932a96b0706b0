"""PyTorch's flash attention on CPUs, where it has none: the operators of the same names and arguments, written out. A
test that runs inside `on_cpu` takes the path for GPUs, with numbers."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fivefold.kernels import blockwise_attention, partial_attention

calls: list[tuple[int, int]] = []
"""Sequences and tokens of the queries of each call, forward and backward."""


def parts(
    q: Tensor, k: Tensor, ends_q: Tensor | None, ends_k: Tensor | None, most_q: int
) -> Iterator[tuple[Any, Any]]:
    """Where the queries and the keys of each sequence are."""
    if ends_q is None or ends_k is None:
        yield from ((b, b) for b in range(len(q)))
        return
    calls.append((len(ends_q) - 1, len(q)))
    assert most_q > 1, "queries of one sequence each are read in another way"
    assert ends_q.dtype == ends_k.dtype == torch.int32
    assert ends_q.is_contiguous()
    assert ends_k.is_contiguous()
    assert (ends_q[0], ends_q[-1], ends_k[0], ends_k[-1]) == (0, len(q), 0, len(k))
    for (a, b), (c, d) in zip(pairwise(ends_q.tolist()), pairwise(ends_k.tolist()), strict=True):
        assert a <= b
        assert c <= d
        yield slice(a, b), slice(c, d)


def scores(q: Tensor, k: Tensor, causal: bool, most_q: int, most_k: int, window: dict[str, Any]) -> Tensor:
    """(H, Q, S). Causal: the last query sees the last key. window: `window_size_left` and `window_size_right`, in keys
    beside a query's own; -1: all."""
    assert q.shape[0] <= most_q
    assert k.shape[0] <= most_k
    assert q.stride(-1) == k.stride(-1) == 1
    x = torch.einsum("qhd,shd->hqs", q.float(), k.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1))
    every, own = torch.ones(x.shape[1:], dtype=torch.bool), x.shape[2] - x.shape[1]
    left, right = (window.get(f"window_size_{side}", -1) for side in ("left", "right"))
    assert right in (-1, 0)
    hidden = every.triu(own + 1) & (causal or right == 0)
    if left >= 0:
        hidden |= every.tril(own - left - 1)
    return (x * q.shape[2] ** -0.5).masked_fill(hidden, -torch.inf)


def forward(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor | None, ends_k: Tensor | None, most_q: int, most_k: int,
    dropout: float, causal: bool, debug: bool, **window: Any,
):  # fmt: skip
    """Like `aten::_flash_attention_forward`: what it does not write is not a number, and the lse of a query that sees
    no key is inf."""
    assert not dropout
    assert not debug
    whole = ends_q is None
    out = torch.full_like(q, torch.nan)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]) if whole else (q.shape[1], q.shape[0]), torch.nan)
    for at, there in parts(q, k, ends_q, ends_k, most_q):
        x = scores(q[at], k[there], causal, most_q, most_k, window)
        values = v[there].float().repeat_interleave(q.shape[-2] // k.shape[-2], dim=1)
        sums = x.logsumexp(2)
        p = (x - sums.clamp(min=-1e30)[..., None]).exp()
        out[at] = torch.einsum("hqs,shd->qhd", p, values).to(q.dtype)
        (lse[at] if whole else lse[:, at]).copy_(sums.masked_fill(sums == -torch.inf, torch.inf))
    nothing = torch.empty(0)
    return out, lse, nothing, nothing, nothing


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ends_q: Tensor | None,
    ends_k: Tensor | None, most_q: int, most_k: int, dropout: float, causal: bool, *_: Any, **window: Any,
):  # fmt: skip
    """Like `aten::_flash_attention_backward`."""
    whole, G = ends_q is None, q.shape[-2] // k.shape[-2]
    assert lse.is_contiguous()
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    for at, there in parts(q, k, ends_q, ends_k, most_q):
        x = scores(q[at], k[there], causal, most_q, most_k, window)
        own = lse[at] if whole else lse[:, at]
        p, do = (x - own[..., None]).exp(), dout[at].float()
        keys, values = (x[there].float().repeat_interleave(G, dim=1) for x in (k, v))
        delta = (do * out[at]).sum(2).T[..., None]
        ds = p * (torch.einsum("qhd,shd->hqs", do, values) - delta) * q.shape[-1] ** -0.5
        dq[at] = torch.einsum("hqs,shd->qhd", ds, keys).to(q.dtype)
        of_keys = torch.einsum("hqs,qhd->shd", ds, q[at].float()), torch.einsum("hqs,qhd->shd", p, do)
        for total, part in zip((dk, dv), of_keys, strict=True):
            total[there] = part.unflatten(1, (-1, G)).sum(2).to(k.dtype)
    return dq, dk, dv


OPERATORS = torch.library.Library("aten", "IMPL")
for name, twin in (("_flash_attention_forward", forward), ("_flash_attention_backward", backward)):
    OPERATORS.impl(name, twin, "CPU")


@contextmanager
def on_cpu() -> Iterator[list[tuple[int, int]]]:
    """Attention takes the operators. Yields `calls`."""
    calls.clear()
    with ExitStack() as stack:
        for module in (blockwise_attention, partial_attention):
            stack.enter_context(patch.object(module, "has_flash", lambda *_: True))
        yield calls
