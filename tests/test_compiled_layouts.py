"""Compiled blocks of layouts whose ranks communicate inside a block compute what one process computes without PyTorch's
compiler. Blocks are those of a run on GPUs, one graph each: a break would be an error."""

from functools import cache, partial

import pytest
import torch
from parity import assert_equal, steps
from ranks import run_ranks
from test_context import Source, on, recipe_of

from fivefold.models.card import card_of
from fivefold.models.recomputation import of_blocks
from fivefold.parallel.parallelize import compile_blocks
from fivefold.recipe import Recipe
from fivefold.step.state import State

MORE = ["model.kv_heads=2", "model.ffn_dim=48"]
ARCHS = {
    "llama": [*MORE, "model.tie_embeddings=true"],
    "gpt2": ["model.ffn_dim=48"],
    "olmo2": ["model.arch=olmo2", *MORE],
    "qwen3": ["model.arch=qwen3", "model.head_dim=8", *MORE],
    "bert": [],
}
BASE = {"olmo2": "llama", "qwen3": "llama"}


def compiled(recipe: Recipe, backend: str, state: State) -> None:
    torch._dynamo.reset()
    card, modes = card_of(recipe.model), of_blocks(recipe.layout.recompute, recipe.model.layers)
    compile_blocks(
        state.parallel.stages, card, state.mesh.layout, modes, backend=backend, fullgraph=True, dynamic=False
    )


def compiled_steps(rank: int, world: int, recipe: Recipe, source: Source, backend: str) -> dict:
    return steps(rank, world, recipe, source, 3, partial(compiled, recipe, backend))


@cache
def one_process(arch: str, targets: str) -> dict:
    return steps(0, 1, recipe_of(BASE.get(arch, arch), *ARCHS[arch]), Source(targets))


CASES = [
    ("llama", "tp=2"), ("llama", "tp=2,sp=true"), ("llama", "tp=2,sp=true,sp_regather=true"),
    ("llama", "tp=2,sp=true,recompute=full"), ("gpt2", "tp=2,sp=true"), ("gpt2", "tp=2"),
    ("olmo2", "tp=2,sp=true"), ("qwen3", "tp=2,sp=true"), 
]  # fmt: skip


def check(arch: str, layout: str, backend: str) -> None:
    world, recipe = on(layout, BASE.get(arch, arch), *ARCHS[arch])
    targets = "uneven" if arch == "bert" else "all"
    answers = run_ranks(world, compiled_steps, recipe, Source(targets), backend, timeout_s=120)
    assert_equal(answers, one_process(arch, targets))


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "layout"), CASES)
def test_equals_one_process(arch: str, layout: str) -> None:
    check(arch, layout, "aot_eager")


@pytest.mark.slow
def test_inductor_reuses_no_memory_of_a_message() -> None:
    check("llama", "tp=2,sp=true", "inductor")
