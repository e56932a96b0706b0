"""AdamW in one pass on CPUs (kernels/elementwise.py) beside PyTorch's."""

from itertools import pairwise

import pytest
import torch

from fivefold.kernels import native
from fivefold.kernels.elementwise import AdamW

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=f"no native kernels: {native.why_not()}")
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
SIZES = (1, 7, 4096, 100_003)


@pytest.fixture(params=["native", "triton's twin"])
def path(request, monkeypatch):
    """The kernel for CPUs, and what a GPU's kernel (kernels/gpu/adamw.py) computes, in plain PyTorch."""
    if request.param != "native":
        monkeypatch.setattr(native, "usable", lambda *tensors: False)
        monkeypatch.setattr(native, "in_triton", lambda kernel, x: True)


def inputs(size: int, number: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(number)) * 10.0 ** (number - 2)


@pytest.mark.parametrize("size", SIZES)
def test_one_pass_is_pytorchs_step_up_to_rounding(path, size):
    ours, theirs = inputs(size, 9).requires_grad_(), inputs(size, 9).requires_grad_()
    working, scale = torch.zeros(size, dtype=torch.bfloat16), torch.tensor(0.3)
    one, other = AdamW([ours], **OPTIONS), torch.optim.AdamW([theirs], **OPTIONS)
    assert one.one_pass
    one.scale, one.working = scale, {ours: working}
    for number in range(5):
        ours.grad, theirs.grad = inputs(size, number), inputs(size, number) * scale
        one.step()
        other.step()
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7)
    assert one.largest == ours.detach().abs().max()
    for name, state in one.state[ours].items():
        torch.testing.assert_close(state, other.state[theirs][name], rtol=2e-6, atol=1e-12)
    assert torch.equal(working, ours.detach().bfloat16())
    assert torch.equal(ours.grad, inputs(size, 4)), "scaled on the way only"


def test_pieces_have_the_bits_of_the_whole():
    size, cuts = 10_007, (0, 3, 1024, 5000, 10_007)
    whole, parts = inputs(size, 9), inputs(size, 9)
    pieces = [parts[a:b] for a, b in pairwise(cuts)]
    for tensors, optimizer in (([whole], AdamW([whole], **OPTIONS)), (pieces, AdamW(pieces, **OPTIONS))):
        optimizer.scale = torch.tensor(0.7)
        for number in range(3):
            at = 0
            for tensor in tensors:
                tensor.grad = inputs(size, number)[at : at + len(tensor)]
                at += len(tensor)
            optimizer.step()
    assert torch.equal(whole, parts)


@pytest.mark.parametrize(
    ("value", "largest"), [(-1e20, 1e20), (torch.inf, torch.inf), (torch.nan, torch.nan)]
)
def test_the_largest_weight_is_seen_wherever_it_is(path, value, largest):
    for place in (0, 7, 4000, 4098):
        weights = [inputs(4099, 9), inputs(50, 9)]
        weights[0][place] = value
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        optimizer = AdamW(weights, **{**OPTIONS, "weight_decay": 0.0})
        optimizer.step()
        torch.testing.assert_close(optimizer.largest, torch.tensor(largest), equal_nan=True)


def test_a_skipped_step_changes_nothing(path):
    weight = inputs(10, 9)
    working = torch.zeros(10, dtype=torch.bfloat16)
    optimizer = AdamW([weight], **OPTIONS)
    optimizer.working, optimizer.found_inf = {weight: working}, torch.ones(())
    weight.grad = torch.full((10,), torch.nan)
    optimizer.step()
    assert torch.equal(weight, inputs(10, 9))
    assert not working.any()
    assert not any(state.any() for state in optimizer.state[weight].values())


def test_memory_of_another_order_is_left_to_pytorch(path):
    weight = torch.randn(8, 4).t()
    assert not AdamW([weight], **OPTIONS).one_pass
