"""AdamW in one pass (kernels/adamw.py) beside PyTorch's."""

from itertools import pairwise

import pytest
import torch

from fivefold.kernels import adamw, native
from fivefold.kernels.adamw import AdamW

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=f"no native kernels: {native.why_not()}")
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
SIZES = (1, 7, 4096, 100_003)


def inputs(size: int, number: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(number)) * 10.0 ** (number - 2)


@pytest.mark.parametrize("size", SIZES)
def test_one_pass_is_pytorchs_step_up_to_rounding(size):
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
    assert ours.grad is not None
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
def test_the_largest_weight_is_seen_wherever_it_is(value, largest):
    for place in (0, 7, 4000, 4098):
        weights = [inputs(4099, 9), inputs(50, 9)]
        weights[0][place] = value
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        optimizer = AdamW(weights, **{**OPTIONS, "weight_decay": 0.0})
        optimizer.step()
        torch.testing.assert_close(optimizer.largest, torch.tensor(largest), equal_nan=True)


def test_a_skipped_step_changes_nothing():
    weight = inputs(10, 9)
    working = torch.zeros(10, dtype=torch.bfloat16)
    optimizer = AdamW([weight], **OPTIONS)
    optimizer.working, optimizer.found_inf = {weight: working}, torch.ones(())
    weight.grad = torch.full((10,), torch.nan)
    optimizer.step()
    assert torch.equal(weight, inputs(10, 9))
    assert not working.any()
    assert not optimizer.state[weight]


def test_memory_of_another_order_is_left_to_pytorch():
    weight = torch.randn(8, 4).t()
    assert not AdamW([weight], **OPTIONS).one_pass


def buffers(sizes, dtype=torch.float32):
    """Tensors that are neighbours in one buffer of zeros."""
    return list(torch.zeros(sum(sizes), dtype=dtype).split(list(sizes)))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_a_gpu_compiles_is_pytorchs_step_up_to_rounding(compiled, monkeypatch):
    """Neighbours are one call. A skipped step changes nothing, and a checkpoint's states move into one buffer."""
    if not compiled:
        monkeypatch.setattr(adamw, "compiled", lambda function, **options: function)
    calls, update, sizes = [], adamw.update, (3 * adamw.ROW, 50, 2 * adamw.ROW + 7)
    monkeypatch.setattr(adamw, "update", lambda *given: (calls.append(len(given[0])), update(*given)))
    ours, grads, working = buffers(sizes), buffers(sizes), buffers(sizes, torch.bfloat16)
    theirs = [inputs(size, size % 3) for size in sizes]
    for weight, other in zip(ours, theirs, strict=True):
        weight.copy_(other)
    one, other = AdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    one.scale, one.working = torch.tensor(0.3), dict(zip(ours, working, strict=True))
    for number in range(4):
        for weight, grad, reference in zip(ours, grads, theirs, strict=True):
            weight.grad = grad.copy_(inputs(len(grad), number))
            reference.grad = grad * 0.3
        if number == 2:  # as a checkpoint brings them
            for weight in ours:
                one.state[weight] = {name: state.clone() for name, state in one.state[weight].items()}
        one.largest = None
        one._compiled(ours, one.param_groups[0])
        other.step()
    assert calls == [sum(sizes)] * 4
    assert one.largest == max(weight.abs().max() for weight in ours)
    for weight, reference, rounded in zip(ours, theirs, working, strict=True):
        torch.testing.assert_close(weight, reference, rtol=2e-6, atol=1e-7)
        assert torch.equal(rounded, weight.bfloat16())
        for name, state in one.state[weight].items():
            torch.testing.assert_close(
                state, other.state[reference][name], rtol=2e-6, atol=1e-8
            )  # means cancel
    kept = [tensor for weight in ours for tensor in (weight, *one.state[weight].values())]
    before = [tensor.clone() for tensor in kept]
    one.found_inf = torch.ones(())
    grads[1].fill_(torch.nan)
    one._compiled(ours, one.param_groups[0])
    assert all(map(torch.equal, kept, before))


def test_tensors_apart_are_apart():
    a, b, c = buffers((3, 4, 5))
    one, other = buffers((3, 4)), torch.zeros(5)
    assert [*adamw.runs([a, b, c])] == [slice(0, 3)]
    assert [*adamw.runs([a, c, b])] == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert [*adamw.runs([a, b, c], [*one, other])] == [slice(0, 2), slice(2, 3)]
