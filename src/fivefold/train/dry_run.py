"""The real training step of one rank of any number, in one process and without its memory: PyTorch's fake process group
communicates with nobody, and fake tensors have shapes and no bytes. What is counted, of tensors that are there, of what
is sent and of products, is what a rank that trains on CPUs would have (tests/test_dry_run.py: to the byte).

What a step reads of its tensors is assumed here: all gradients are finite, all targets count, experts share tokens
evenly, and of BERT's tokens as many are masked as batches mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._meta_registrations import _create_grouped_mm_output_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.layout import Layout
from fivefold.observe.collectives import Collectives
from fivefold.observe.flops import Flops
from fivefold.observe.tracking import Peak, Tracker, states_of
from fivefold.parallel.context import take
from fivefold.parallel.expert import AllToAll
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.ranks import Ranks, threads_of
from fivefold.recipe import Recipe
from fivefold.recipe.count import MASKED_SHARE
from fivefold.recipe.schema import ModelSection
from fivefold.train.loop import take_step
from fivefold.train.share import Microbatch
from fivefold.train.state import State, assemble

aten = torch.ops.aten
_READS = (aten._local_scalar_dense.default, aten.item.default)
_PUTS = (aten.index_put_.default, aten._index_put_impl_.default)


@dataclass(frozen=True)
class Traced:
    """A step of one rank. sent: {(operation, axis): (calls, bytes)}, counted as `observe.collectives` does."""

    memory: Peak
    sent: dict[tuple[str, str], tuple[int, int]]
    flops: int


def trace(recipe: Recipe, rank: int, microbatches: int) -> Traced:
    """The second step of a resolved recipe on a rank of its layout: the first one makes the optimizer's states."""
    layout = Layout.from_recipe(recipe.layout)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with _one_of(rank, layout.ranks) as ranks:
        state = assemble(recipe, ranks, memory=fake)
        try:
            _share_evenly(state)
            with fake, Assumed(recipe.model):
                take_step(state, recipe, _batch(recipe, state.mesh, min(2, microbatches)))
                batch = _batch(recipe, state.mesh, microbatches)
                with Tracker(states_of(state)) as memory, Collectives(state.mesh) as sent, Flops() as flops:
                    take_step(state, recipe, batch)
        finally:
            for replica in state.parallel.replicas:
                replica.close()
    found = {key: (calls, size) for key, (calls, size) in sorted(sent.found.items())}
    return Traced(memory.peak(), found, flops.total)


@contextmanager
def _one_of(rank: int, world: int) -> Iterator[Ranks]:
    """One of many ranks that share this machine, of which the others are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    threads = torch.get_num_threads()
    torch.set_num_threads(threads_of(world))  # some kernels have workspace for each
    if world > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield Ranks(rank, world, rank, world, torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)
        if world > 1:
            dist.destroy_process_group()


def _batch(recipe: Recipe, mesh: Mesh, microbatches: int) -> list[Microbatch]:
    shape = recipe.train.microbatch_size or 1, recipe.model.seq_len

    def tokens() -> Tensor:
        return take(torch.empty(shape, dtype=torch.int64, device=mesh.device), mesh)

    return [(tokens(), tokens()) for _ in range(microbatches)]


def _share_evenly(state: State) -> None:
    """Every rank sends each other as many rows as it gets from it."""
    for stage in state.parallel.stages:
        for module in stage.modules():
            if isinstance(module, AllToAll):
                module.splits = _even  # pyright: ignore[reportAttributeAccessIssue]


def _even(rows_2G: Tensor, rows: int) -> list[list[int]]:
    ranks = rows_2G.shape[1]
    return [[rows // ranks + (index < rows % ranks) for index in range(ranks)]] * 2


class Assumed(TorchDispatchMode):
    """Answers what a step asks of values that fake tensors do not have. A number that is read is 1: it decides about
    no memory."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.model = model

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS and isinstance(args[0], FakeTensor) and args[0].constant is None:
            return 1.0 if args[0].is_floating_point() else 1
        if func is aten.bincount.default:  # nothing is beyond `minlength`
            return args[0].new_empty(kwargs["minlength"] if "minlength" in kwargs else args[2])
        if func is aten.index.Tensor and _is_mask(args[1]):
            mask = args[1][0]
            return args[0].new_empty(self.chosen(mask), *args[0].shape[mask.dim() :])
        if func in _PUTS and _is_mask(args[1]):
            return args[0]
        if (
            func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16
        ):  # its fake form knows bf16 only
            offsets = kwargs["offs"] if "offs" in kwargs else args[2]
            return _create_grouped_mm_output_tensor(args[0], args[1], offsets, args[0].dtype)
        return func(*args, **kwargs)

    def chosen(self, mask: Tensor) -> int:
        """Elements that a mask lets through: masked tokens (B, T), or slots (M) that their experts have room for."""
        model = self.model
        if model.arch == "bert":
            return mask.shape[0] * max(1, round(MASKED_SHARE * mask.shape[1]))
        assert model.experts, "nothing else is chosen by its values"
        room = math.ceil(model.capacity_factor * mask.numel() / model.experts)
        return min(mask.numel(), model.experts * room)


def _is_mask(indices: Any) -> bool:
    return len(indices) == 1 and indices[0] is not None and indices[0].dtype == torch.bool
