"""What a trace makes of a block: tensors of the sizes that its graphs keep, no results of joined operations, and the
kernels of what runs one by one."""

import pytest
import torch
import torch.nn.attention.varlen  # defines operators
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fivefold.kernels import native
from fivefold.kernels.blockwise_attention import qkv_attention
from fivefold_plan.trace.blocks import Block, Kept, _keep, outside_graphs
from fivefold_plan.trace.compiled import Compiler
from fivefold_plan.trace.fake import FakeMode
from fivefold_plan.trace.memory import Tracker

aten = torch.ops.aten
SIZE = 400
"""Bytes of `tensor`."""


def tensor() -> Tensor:
    return torch.ones(SIZE // 4, requires_grad=True)


def own(kept: Kept, x: Tensor) -> list[bool]:
    """For each tensor that no operation has offered: is it the input?"""
    return [other.untyped_storage()._cdata == x.untyped_storage()._cdata for other in kept.others]


def test_as_many_are_kept_as_graphs_keep() -> None:
    kept, first, second, third = Kept([SIZE], list), tensor(), tensor(), torch.ones(7)
    assert kept.pack(first) is first
    assert kept.pack(first) is first, "again the same"
    for other in (second, third):
        dropped = kept.pack(other)
        assert callable(dropped)
        assert kept.unpack(dropped).shape == other.shape
    assert kept.pack(first.view(4, -1)).shape == (4, SIZE // 16)


def test_a_weight_gathered_within_the_pass_takes_no_tensors_place() -> None:
    """ZeRO-3 gathers experts when their layer begins. Mixtral's, one per rank, are as large as the gate's result."""
    living, weight, first = list[Tensor](), tensor(), tensor()
    kept = Kept([SIZE], lambda: living)
    living.append(weight)
    assert kept.pack(weight.view(4, -1)).shape == (4, SIZE // 16)
    assert kept.pack(first) is first


def test_what_no_operation_offers() -> None:
    """First the block's input, if it is not kept yet."""
    for offered, expected in ((False, [True, False]), (True, [False])):
        kept, x = Kept([SIZE, SIZE], list), tensor()
        if offered:
            kept.pack(x)
        kept.rest(x)
        assert own(kept, x) == expected
        assert [other.untyped_storage().nbytes() for other in kept.others] == [SIZE] * len(expected)


def test_what_leaves_the_device() -> None:
    """Goes once, and counts once; code between graphs offers all that it saves."""
    x, weight, gone = tensor(), tensor(), list[Tensor]()

    def leave(given: Tensor) -> object:
        if given is weight:
            return given
        gone.append(given)
        return "away", given.detach()

    with saved_tensors_hooks(leave, lambda packed: packed if isinstance(packed, Tensor) else packed[1]):
        kept = Kept([SIZE, SIZE], lambda: [weight])
    packed = kept.pack(x)
    assert packed[0] == "away"
    assert kept.unpack(packed).equal(x)
    assert callable(kept.pack(x))
    assert kept.pack(weight) is weight
    assert len(gone) == 1
    kept.rest(x)
    assert [packed[0] for packed in kept.others] == ["away"], "the other one of two"
    assert len(gone) == 2
    with saved_tensors_hooks(kept.pack, kept.unpack):
        within = torch.exp(x[:7])
        between = outside_graphs(torch.exp)(x[:8])
    assert len(gone) == 3
    assert gone[2].equal(between)
    (within.sum() + between.sum()).backward()


def test_joined_results_are_in_no_memory() -> None:
    """Nor are their views. What is left when the code ends is."""
    with FakeMode(), Tracker() as tracker:
        x = torch.empty(20, 50)
        tracker.enter_code("code")
        doubled = (x * 2).view(50, 20).t()
        sums = doubled.sum(1)
        del doubled
        tracker.leave_code("code")
    assert tracker.peak().total == x.nbytes + sums.nbytes


@pytest.mark.parametrize("trained", [True, False], ids=["a later block", "the first one that is trained"])
def test_code_runs_from_a_blocks_gradient_to_that_of_its_input(trained: bool) -> None:
    """Or to the end of backward, if its input has none."""
    linear, tracker, within = nn.Linear(3, 3), Tracker(), list[bool]()
    assert isinstance(linear.bias, Tensor)
    linear.bias.register_hook(lambda _: within.append(tracker.inside is not None))
    _keep(linear, Block(True, graphs=1), tracker)
    out = linear(torch.ones(2, 3, requires_grad=trained))
    assert tracker.inside is None
    out.sum().backward()
    assert within == [True]
    assert tracker.inside is None


def test_nothing_runs_for_frozen_weights() -> None:
    linear, tracker = nn.Linear(3, 3).requires_grad_(False), Tracker()
    _keep(linear, Block(True, graphs=1), tracker)
    assert not linear(torch.ones(2, 3)).requires_grad
    assert tracker.inside is None


def test_kernels_that_run_one_by_one() -> None:
    """Views have none. Bytes are those of all but matmuls and attention."""
    block, x = Block(False), torch.ones(2, 3)
    compiler = Compiler(block, set())
    for func, *args in (
        (aten.mul.Tensor, x, x),
        (aten.mm.default, x, x.T),
        (aten.view.default, x, [6]),
        (aten._unsafe_view.default, x, [6]),
        (torch.ops.torch_attn._varlen_attn.default, x, x, x),
    ):
        compiler.see(func, args, x)
    assert block.kernels == [3, 0]
    assert block.moved == [3 * x.nbytes, 0]


def test_values_are_copied_on_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU without native.c, too, a view keeps the projection."""
    monkeypatch.setattr(native, "usable", lambda *_: False)
    qkv, saved = torch.ones(1, 8, 3 * 16, requires_grad=True) * 1, list[int]()
    angles = torch.ones(8, 8)

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.untyped_storage()._cdata)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        qkv_attention(qkv, 1, 1, angles, angles, causal=True)
    assert qkv.untyped_storage()._cdata in saved


def test_words_of_a_block() -> None:
    kernels = "3 kernels in forward, 5 in backward"
    whole = Block(True, graphs=1, kernels=[3, 5], kept=[2**20, 2**19])
    assert whole.text == f"{kernels}; 1 graph, 0 breaks; keeps 1.5 MiB for backward"
    cut = Block(True, graphs=2, breaks=[{"why": "it sends", "at": "a.py:7"}], kernels=[3, 5], kept=[2**20])
    assert cut.text == f"{kernels}; 2 graphs, 1 break, at a.py:7"
    assert Block(True, kernels=[3, 5]).text == f"{kernels}; 0 graphs, 0 breaks"
    assert Block(False, kernels=[3, 5]).text == f"{kernels}; it is not compiled"
