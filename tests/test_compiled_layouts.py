"""Compiled blocks of layouts whose ranks communicate inside a block compute what one process computes without PyTorch's
compiler. Blocks are those of a run on GPUs, one graph each: a break would be an error."""

import gc
import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from functorch.compile import make_boxed_func
from parity import assert_equal, steps
from ranks import run_ranks
from test_documents import Source, one_process, recipe_of
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import fresh_inductor_cache

from fivefold.models.base import build
from fivefold.models.card import card_of
from fivefold.models.recomputation import of_blocks
from fivefold.parallel import context, operators
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.parallelize import compile_blocks
from fivefold.recipe import Recipe
from fivefold.schedules.chunks import actions
from fivefold.sharding.layout import Layout
from fivefold.step.state import State
from fivefold_plan.trace.fake import CPU
from fivefold_plan.trace.step import one_of

CASES = [
    ("llama", "tp=2"), ("llama", "tp=2,sp=true"), ("llama", "tp=2,sp=true,sp_regather=true"),
    ("olmo2", "tp=2,sp=true,tp_chunks=2"), ("llama", "tp=2,sp=true,sp_regather=true,tp_chunks=4,recompute=full"),
    ("llama", "tp=2,sp=true,recompute=full"), ("llama", "tp=2,sp=true,recompute=ops:attention+gate+norm"),
    ("llama", "cp=2"), ("llama", "cp=2,cp_method=ulysses"), ("llama", "cp=2,cp_method=all_gather"),
    ("llama", "cp=2,recompute=full"), ("llama", "dp_shard=2,zero=3,recompute=ops:attention+gate+norm"),
    ("gpt2", "tp=2"), ("gpt2", "tp=2,sp=true,recompute=ops:norm"), ("gpt2", "tp=2,cp=2,sp=true"),
    ("bert", "tp=2,sp=true"), ("bert", "cp=2"), ("olmo2", "tp=2,sp=true"), ("olmo2", "cp=2,cp_method=ulysses"),
    ("deepseek", "tp=2,sp=true,tp_chunks=2"),
]  # fmt: skip


def compiled(recipe: Recipe, backend: Any, state: State) -> None:
    torch._dynamo.reset()
    stages, card = state.parallel.stages, card_of(recipe.model)
    modes = of_blocks(recipe.layout.recompute, recipe.model.layers)
    compile_blocks(stages, card, state.mesh.layout, modes, backend=backend, fullgraph=True)


def compiled_steps(rank: int, world: int, recipe: Recipe, source: Source, backend: str) -> dict[str, Any]:
    before = counters["stats"]["unique_graphs"]
    found = steps(rank, world, recipe, source, prepare=partial(compiled, recipe, backend))
    assert counters["stats"]["unique_graphs"] > before, "nothing was compiled"
    return found


def on(layout: str, model: str) -> tuple[int, Recipe]:
    recipe = recipe_of(model, *(f"layout.{part}" for part in layout.split(",")))
    return Layout.from_recipe(recipe.layout).ranks, recipe


def check(model: str, layout: str, backend: str) -> None:
    world, recipe = on(layout, model)
    found = run_ranks(world, compiled_steps, recipe, Source(), backend, timeout_s=120)
    assert_equal(found, one_process(model, "concat"))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_equals_one_process(model: str, layout: str) -> None:
    check(model, layout, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=2", "tp=2,sp=true", "cp=2"])
def test_inductor_reuses_no_memory_of_a_message(layout: str) -> None:
    check("llama", layout, "inductor")


def test_a_model_outlives_another_with_the_same_ranks() -> None:
    """Compiled code finds the axes and the attention of its own model, whichever was made first."""
    recipe = recipe_of("llama", "layout.cp=2")
    with one_of(0, 2, CPU) as ranks:
        meshes = [Mesh(Layout(cp=2), ranks) for _ in range(2)]
        assert meshes[0].axis("cp").group is meshes[1].axis("cp").group
        for first, last in ((0, 0), (0, 1)):  # on one mesh, on two
            models = [build(recipe.model) for _ in range(2)]
            for model, number in zip(models, (first, last), strict=True):
                context.apply(model, meshes[number])
            stays, axis = models[0], meshes[first].axis("cp")
            del models, model
            gc.collect()
            assert operators.axes[axis.key] is axis
            for module in stays.modules():
                if isinstance(module, context.OverRanks):
                    assert context.cores[module.key].axis is axis
        key = meshes.pop().axis("cp").key
        gc.collect()
        assert key not in operators.axes


def order(rank: int, world: int, recipe: Recipe) -> list[dict[str, list[str]]]:
    """The operations of each backward graph in their order: by name, the names of what they read."""
    graphs = list[dict[str, list[str]]]()

    def forward(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        return make_boxed_func(graph.forward)

    def backward(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append({node.name: [arg.name for arg in node.all_input_nodes] for node in graph.graph.nodes})
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward)
    steps(rank, world, recipe, Source(), 1, partial(compiled, recipe, backend))
    return graphs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "each"), [("tp=2", 1), ("tp=2,sp=true", 1), ("tp=2,sp=true,tp_chunks=4", 4)]
)
def test_a_sum_overlaps_with_the_gradient_of_a_weight(layout: str, each: int) -> None:
    """It starts before the matmul, and its wait reads the matmul's result: no compiler moves that behind the wait."""
    world, recipe = on(layout, "llama")
    graphs = run_ranks(world, order, recipe, timeout_s=120)[0]
    assert graphs
    for graph in graphs:
        place, overlapped = {name: at for at, name in enumerate(graph)}, 0
        for name, reads in graph.items():
            matmuls = [read for read in reads if read.startswith("mm")]
            if not matmuls or not name.startswith(("await_message", "auto_functionalized")):
                continue
            ticket = reads[0]
            while ticket.startswith("getitem"):
                [ticket] = graph[ticket]
            assert place[ticket] < place[matmuls[0]]
            overlapped += 1
        assert overlapped == 2 * each, "attention's first matmul and that of the feed-forward layer"


def calls(rank: int, world: int, recipe: Recipe) -> list[str]:
    """Of each graph that Inductor compiles, in its order: s a message's start, w the wait for it, m a matmul."""
    found, call = (
        list[str](),
        re.compile(r"fivefold\.(start|await)_message\.default\(|extern_kernels\.(?:add)?mm\("),
    )

    def read(code: str) -> None:
        found.append("".join({"start": "s", "await": "w", None: "m"}[one[1]] for one in call.finditer(code)))

    with patch.object(GraphLowering, "save_output_code", staticmethod(read)), fresh_inductor_cache():
        steps(rank, world, recipe, Source(), 1, partial(compiled, recipe, "inductor"))
    return found


@pytest.mark.slow
def test_inductor_keeps_messages_beside_the_products_of_other_chunks() -> None:
    """The order is that of `schedules/chunks.py`, also without gradients. In backward the gradient of a weight is
    behind what is gathered, and before the waits for what is scattered."""
    world, recipe = on("tp=2,sp=true,tp_chunks=4", "gpt2")
    forward, backward, *validation = run_ranks(world, calls, recipe, timeout_s=120)[0]
    assert validation == [forward]
    gather, scatter = ("".join(a.what[0] for a in actions(gathers, 4)) for gathers in (True, False))
    assert forward == 2 * (gather + scatter)
    assert backward == 2 * (gather + "m" + scatter.replace("wwww", "mwwww"))
