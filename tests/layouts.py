"""A tiny model on any layout, compared with one process by the core of `fivefold verify`, on the rank pool."""

import shutil
import tempfile
from pathlib import Path
from unittest import mock

import torch
from pool_runs import ranks_of
from ranks import run_ranks
from torch._dynamo.utils import counters

from fivefold.data import prepare
from fivefold.launch.ranks import Ranks
from fivefold.models.card import card_of
from fivefold.models.recomputation import of_blocks
from fivefold.parallel.parallelize import compile_blocks
from fivefold.recipe import Recipe, load, resolve
from fivefold.sharding.layout import Layout
from fivefold.step.state import State
from fivefold.train import verify
from fivefold.train.verify import Report, alone, compare_with_one_process, compute, prepared

TINY = [
    "model.layers=4", "model.dim=32", "model.heads=4", "model.kv_heads=4", "model.ffn_dim=64", "model.seq_len=16",
    "model.init_std=0.2", "model.tie_embeddings=true", "data.tokenizer=bytes", "train.global_batch_size=8",
    "train.microbatch_size=1", "train.sample_every=0", "train.sample_tokens=4", "train.val_sequences=7",
    "optim.lr=1e-3", "optim.warmup_steps=0",
]  # fmt: skip
MOE = ["model.arch=moe", "model.experts=8", "model.experts_per_token=2"]


def tiny(folder: Path, layout: str, *overrides: str, mode: str = "fp32", steps: int = 3) -> Recipe:
    """The recipe as verify prepares it; its text and cache lie in `folder`. Layouts with ep get a model of experts."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("".join(f"{i} squared is {i * i}, and the next one follows. " for i in range(600)))
    moe = MOE if "ep=" in layout else []
    sets = [*TINY, f"data.source={text}", f"data.cache={folder / 'cache'}", *moe, *overrides]
    return prepared(load("quickstart", sets, layout), None, steps, mode)[0]


def side(rank: int, world: int, recipe: Recipe, steps: int, folder: Path) -> None:
    """A rank's part of the layout's side."""
    data = prepare(recipe)
    recipe = resolve(recipe, vocab_size=data.vocab_size)
    compute(recipe, data, steps, folder, ranks_of(rank, world))


def compiled(rank: int, world: int, recipe: Recipe, steps: int, folder: Path) -> None:
    """`side` with the blocks compiled that a GPU's run compiles, by all of PyTorch's compiler but its last part."""
    build, found = verify.build_state, counters["stats"]
    before, layout = found["unique_graphs"], Layout.from_recipe(recipe.layout)

    def built(recipe: Recipe, ranks: Ranks) -> State:
        state, model = build(recipe, ranks), recipe.model
        modes = of_blocks(layout.recompute, model.blocks)
        compile_blocks(state.parallel.stages, card_of(model), layout, modes, backend="aot_eager")
        return state

    torch._dynamo.reset()
    with mock.patch.object(verify, "build_state", built):
        side(rank, world, recipe, steps, folder)
    assert found["unique_graphs"] > before


def compared(
    recipe: Recipe, steps: int = 3, part=side, folder: Path | None = None, timeout_s: float = 60
) -> Report:
    """Runs a recipe's layout on the rank pool and one process beside it. part: what each rank runs. folder: where the
    reference of the same model stays for the next comparison."""
    world, data = Layout.from_recipe(recipe.layout).ranks, prepare(recipe)
    resolved = resolve(recipe, vocab_size=data.vocab_size)
    with tempfile.TemporaryDirectory(prefix="fivefold-compared-") as temporary:
        folder = folder or Path(temporary)
        shutil.rmtree(folder / "layout", ignore_errors=True)
        if world == 1:
            compute(resolved, data, steps, folder / "layout", alone())
        else:
            run_ranks(world, part, recipe, steps, folder / "layout", timeout_s=timeout_s)
        return compare_with_one_process(resolved, data, steps, folder)
