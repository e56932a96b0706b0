"""Offload: the same bits as in memory, whatever lies in host memory or on disk."""

from pathlib import Path

import pytest
import torch
from layouts import tiny
from ranks import run_ranks
from runs import ranks_of

from fivefold.data import prepare
from fivefold.recipe import change, resolve
from fivefold.spread import tiers
from fivefold.spread.layout import Layout
from fivefold.step.state import build_state
from fivefold.step.step import take_step
from fivefold.train.share import batches_of, share_of

STEPS = 3


def trained(rank: int, world: int, recipe):
    """Losses and norms of some steps, and weights, moments and gradients after them."""
    tiers.CHUNK = 2048  # several chunks per parameter; slots stay larger
    data = prepare(recipe)
    recipe, train = resolve(recipe, vocab_size=data.vocab_size), recipe.train
    state = build_state(recipe, ranks_of(rank, world))
    batches = batches_of(recipe, data, data.train, train.global_batch_size, shuffle=True)
    figures = []
    for step in range(STEPS):
        share = share_of(batches, step, train.global_batch_size, train.microbatch_size or 1, state.mesh)
        done = take_step(state, recipe, share)
        figures += [done.loss, done.norm]
    kept = {**state.masters(), **state.moments(), **{f"gradient of {n}": t for n, t in state.gradients().items()}}
    found = {name: t.clone() for name, t in kept.items()}
    state.parallel.close()
    return figures, found


def compared(recipe, offload: str, folder: Path) -> None:
    world = Layout.from_recipe(recipe.layout).ranks
    away = change(recipe, [f"layout.offload={offload}", f"layout.offload_dir={folder / 'away'}"])
    for (one, kept), (other, same) in zip(
        *(run_ranks(world, trained, r) if world > 1 else [trained(0, 1, r)] for r in (recipe, away)), strict=True
    ):
        assert one == other
        assert kept.keys() == same.keys()
        for name in kept:
            if not (name.startswith("gradient") and offload in ("all:disk", "states:host")):  # there not clipped
                assert torch.equal(kept[name], same[name]), name
    assert not (folder / "away").exists() or not [*(folder / "away").iterdir()]


CASES = [
    ("states:disk", "bf16", "dp=1", []),
    ("all:disk", "bf16", "dp=1", []),
    ("all:disk", "fp32", "dp=1,recompute=full", []),
    ("states:host", "bf16", "dp=1", []),
    ("states:disk", "fp32", "dp=1", ["optim.name=momentum", "optim.lr=0.05", "optim.grad_clip=0.1"]),
    ("states:disk", "bf16", "dp=2,zero=3", []),
    ("states:disk", "bf16", "dp=2,zero=1", ["optim.name=nesterov"]),
    ("all:disk", "bf16", "dp=2", []),
    ("all:disk", "bf16", "tp=2", []),
    ("states:host", "bf16", "tp=2", []),
    ("states:disk", "bf16", "pp=2", []),
    ("states:host", "bf16", "pp=2", []),
    ("states:host", "bf16", "dp=2,zero=2", []),
    ("states:disk", "bf16", "dp=2,ep=2", []),
    ("all:disk", "bf16", "dp=2,ep=2", []),
]


@pytest.mark.parametrize(("offload", "mode", "layout", "sets"), CASES)
def test_equals_in_memory_bit_for_bit(tmp_path, offload, mode, layout, sets):
    compared(tiny(tmp_path, layout, *sets, mode=mode), offload, tmp_path)
