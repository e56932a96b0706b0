"""What a trace keeps of a compiled block: tensors of the sizes that its graphs keep, and no results of joined
operations."""

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fivefold.trace.blocks import Block, Kept, outside_graphs
from fivefold.trace.fake import FakeMode
from fivefold.trace.memory import Tracker

SIZE = 400
"""Bytes of `tensor`."""


def tensor() -> Tensor:
    return torch.ones(SIZE // 4, requires_grad=True)


def own(kept: Kept, x: Tensor) -> list[bool]:
    """For each tensor that no operation has offered: is it the input?"""
    return [other.untyped_storage()._cdata == x.untyped_storage()._cdata for other in kept.others]


def test_as_many_are_kept_as_graphs_keep() -> None:
    kept, first, second, third = Kept([SIZE], set()), tensor(), tensor(), torch.ones(7)
    assert kept.pack(first) is first
    assert kept.pack(first) is first, "again the same"
    for other in (second, third):
        dropped = kept.pack(other)
        assert callable(dropped)
        assert kept.unpack(dropped).shape == other.shape
    assert kept.pack(first.view(4, -1)).shape == (4, SIZE // 16)


def test_what_no_operation_offers() -> None:
    """First the block's input, if it is not kept yet."""
    for offered, expected in ((False, [True, False]), (True, [False])):
        kept, x = Kept([SIZE, SIZE], set()), tensor()
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
        kept = Kept([SIZE, SIZE], {weight.untyped_storage()._cdata})
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


def test_words_of_a_block() -> None:
    kernels = "3 kernels in forward, 5 in backward"
    whole = Block(True, graphs=1, kernels=[3, 5], kept=[2**20, 2**19])
    assert whole.text == f"{kernels}; 1 graph, 0 breaks; keeps 1.5 MiB for backward"
    cut = Block(True, graphs=2, breaks=[{"why": "it sends", "at": "a.py:7"}], kernels=[3, 5], kept=[2**20])
    assert cut.text == f"{kernels}; 2 graphs, 1 break, at a.py:7"
    assert Block(True, kernels=[3, 5]).text == f"{kernels}; 0 graphs, 0 breaks"
    assert Block(False, kernels=[3, 5]).text == f"{kernels}; it is not compiled"
