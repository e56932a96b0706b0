"""A window, a cap and a sink: each function that attends computes them, or refuses them by name."""

from contextlib import nullcontext
from typing import Any

import flash_twin
import numpy as np
import pytest
import torch
import torch.distributed as dist
from marks import all_but
from ranks import run_ranks
from torch import Tensor

from fivefold.comm import Axis
from fivefold.errors import UserError
from fivefold.kernels import native
from fivefold.kernels.blockwise_attention import Documents, Scores
from fivefold.models.layers import AttentionCore, LayerCache, cached_attention
from fivefold.parallel import context
from fivefold.sharding.layout import Layout
from fivefold.sharding.sequence import METHODS, token_spans

B, T, H, K, d = 2, 16, 4, 2, 8
FIRST = np.array([[0] * 4 + [4] * 12, [0] * 9 + [9] * 7])
SETTINGS = {
    "window": (3, 0.0, False),
    "soft_cap": (0, 0.7, False),
    "sink": (0, 0.0, True),
    "all": (4, 0.5, True),
}


def one_query(x: Tensor, keys: Tensor, values: Tensor, cap: float, sink: Tensor | None) -> Tensor:
    """x (d), keys and values (S, d) that it sees."""
    scores = keys @ x / d**0.5
    if cap:
        scores = cap * (scores / cap).tanh()
    weights = scores.exp()
    return weights @ values / (weights.sum() + (0 if sink is None else sink.exp()))


def reference(qkv: Tensor, window: int, cap: float, sink: Tensor | None, first: np.ndarray) -> Tensor:
    q, k, v = qkv.view(B, T, -1, d).split([H, K, K], 2)
    rows = []
    for b, t, h in np.ndindex(B, T, H):
        seen, at = slice(max(int(first[b, t]), t + 1 - (window or T)), t + 1), h * K // H
        own = None if sink is None else sink[h]
        rows.append(one_query(q[b, t, h], k[b, seen, at], v[b, seen, at], cap, own))
    return torch.stack(rows).view(B, T, H * d)


def inputs(setting: str) -> tuple[Tensor, Tensor, Scores]:
    """qkv, the gradient of the output, scores."""
    torch.manual_seed(0)
    window, cap, has_sink = SETTINGS[setting]
    sink = torch.randn(H).requires_grad_() if has_sink else None
    return (
        torch.randn(B, T, (H + 2 * K) * d).requires_grad_(),
        torch.randn(B, T, H * d),
        Scores(window, cap, sink),
    )


def compare(got: Tensor, qkv: Tensor, dout: Tensor, scores: Scores, first: np.ndarray) -> None:
    """Values and gradients, with fp64."""
    window, cap, sink = scores
    exact = qkv.detach().double().requires_grad_()
    exact_sink = None if sink is None else sink.detach().double().requires_grad_()
    wanted = reference(exact, window, cap, exact_sink, first)
    got.backward(dout)
    wanted.backward(dout.double())
    pairs: list[Any] = [(got, wanted), (qkv.grad, exact.grad)]
    if sink is not None and exact_sink is not None:
        pairs.append((sink.grad, exact_sink.grad))
    for a, b in pairs:
        assert (a.double() - b).abs().max() < 4e-6 * b.abs().max()


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_attention_of_whole_sequences_and_documents(setting, documents):
    qkv, dout, scores = inputs(setting)
    first = FIRST if documents else 0 * FIRST
    got = AttentionCore(H, K)(qkv, documents=Documents(FIRST) if documents else None, scores=scores)
    compare(got, qkv, dout, scores, first)


@pytest.mark.parametrize("documents", [False, True])
def test_flash_attention_has_a_window(documents, monkeypatch):
    """On GPUs, by the twin of PyTorch's operators."""
    monkeypatch.setattr(native, "usable", lambda *_: False)
    qkv, dout, scores = inputs("window")
    with flash_twin.on_cpu() as calls:
        of = Documents(FIRST) if documents else None
        got = AttentionCore(H, K)(qkv, documents=of, scores=scores)
        compare(got, qkv, dout, scores, FIRST if documents else 0 * FIRST)
    assert calls == [(4 if documents else B, B * T)] * 2


@pytest.mark.parametrize("setting", SETTINGS)
def test_generation(setting):
    """Token by token, and several at once, behind a cache."""
    qkv, _, scores = inputs(setting)
    with torch.no_grad():
        wanted = reference(qkv, *scores, 0 * FIRST)
        cache = LayerCache((B, T, K, d), torch.float32, "cpu")
        parts = [cached_attention(x, H, K, None, None, cache, scores) for x in qkv.split([5, 1, 1, 9], dim=1)]
    assert torch.allclose(torch.cat(parts, dim=1), wanted, atol=1e-6)


def over_ranks(
    rank: int, world: int, setting: str, method: str, documents: bool, flash: bool = False
) -> list[tuple[float, float]]:
    """Attention over ranks beside whole sequences: differences and sizes of values, of gradients, of those of the sink
    summed over ranks. flash: by the twin of GPUs' kernels."""
    assert dist.group.WORLD is not None
    axis = Axis("cp", range(world), rank, torch.device("cpu"), dist.group.WORLD)
    qkv, dout, scores = inputs(setting)
    layout, of = Layout(cp=world, cp_method=method), Documents(FIRST) if documents else None
    spans = token_spans(layout, T, rank)
    mine = torch.cat([torch.arange(*span) for span in spans])
    part = qkv.detach()[:, mine].clone().requires_grad_()
    sink = None if scores.sink is None else scores.sink.detach().clone().requires_grad_()
    attention = context.METHODS[method](AttentionCore(H, K), axis, layout)
    with flash_twin.on_cpu() if flash else nullcontext():
        got = attention(part, documents=of, scores=scores._replace(sink=sink))
        got.backward(dout[:, mine])
    wanted = AttentionCore(H, K)(qkv, documents=of, scores=scores)
    wanted.backward(dout)
    assert qkv.grad is not None
    pairs: list[Any] = [(got, wanted[:, mine]), (part.grad, qkv.grad[:, mine])]
    if sink is not None and scores.sink is not None:
        dist.all_reduce(sink.grad)
        pairs.append((sink.grad, scores.sink.grad))
    return [(float((a - b).abs().max()), float(b.abs().max())) for a, b in pairs]


@all_but("ring-4-False-window", "all_gather-4-True-all")
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_ranks_equal_one_process(method, world, documents, setting):
    if method == "ulysses" and world > K:
        pytest.skip("the ranks must divide the heads")
    for pairs in run_ranks(world, over_ranks, setting, method, documents):
        assert all(difference < 8e-6 * size for difference, size in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "setting"),
    [("all_gather", "window"), ("all_gather", "sink"), ("ring", "sink"), ("ring", "window")],
)
@pytest.mark.parametrize("documents", [False, True])
def test_flash_attention_of_ranks_equals_one_process(method, setting, documents):
    for pairs in run_ranks(2, over_ranks, setting, method, documents, True):
        assert all(difference < 8e-6 * size for difference, size in pairs)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("setting", ["soft_cap", "all"])
def test_a_cap_is_computed_by_tiles_where_flash_attention_is(setting, documents, monkeypatch):
    monkeypatch.setattr(native, "usable", lambda *_: False)
    qkv, dout, scores = inputs(setting)
    with flash_twin.on_cpu() as calls:
        of = Documents(FIRST) if documents else None
        got = AttentionCore(H, K)(qkv, documents=of, scores=scores)
        compare(got, qkv, dout, scores, FIRST if documents else 0 * FIRST)
    assert calls == []


def test_a_window_needs_causal_attention():
    qkv, _, scores = inputs("window")
    with pytest.raises(
        UserError, match="attention with window = 3: not supported by models that are not causal"
    ):
        AttentionCore(H, K, causal=False)(qkv, scores=scores)
