"""What blocks are compiled to on a GPU, found without one: graphs, breaks, kernels, and what they keep for backward."""

import pytest
from test_trace_gpu import recipe_of

from fivefold.models.recomputation import of_blocks
from fivefold.plan.cluster.clusters import parse
from fivefold.plan.memory.memory import kept
from fivefold.plan.predict import predict
from fivefold.recipe import Recipe
from fivefold.sharding.layout import Layout
from fivefold.trace import gpu
from fivefold.trace.blocks import Block

pytestmark = pytest.mark.skipif(bool(gpu.why_not()), reason=gpu.why_not())
WIDE = [
    "model.dim=512",
    "model.ffn_dim=1536",
    "model.seq_len=1024",
    "model.vocab_size=4096",
    "model.dropout=0.0",
]


def traced(*recipes: Recipe) -> list[dict]:
    """The answers of one process."""
    answers = gpu.on_gpu([(recipe, 0) for recipe in recipes])
    for answer in answers:
        assert "error" not in answer, answer["error"]
    return [answer["exact"] for answer in answers]


def block(answer: dict) -> Block:
    [only] = answer["blocks"].values()
    return Block(**only)


def planned(recipe: Recipe) -> float:
    """Bytes that the planner lets a block keep."""
    s = predict(recipe, parse(f"h100:{Layout.from_recipe(recipe.layout).ranks}")).setting
    return kept(s.work.block[False], of_blocks(recipe.layout.recompute, recipe.model.layers)[0], s.software)


def test_one_graph_keeps_what_the_plan_says() -> None:
    """Without breaks. Each block of a traced step keeps as much, and less than in Python."""
    deep, shallow = (recipe_of("dp=1", "llama", *WIDE, f"model.layers={layers}") for layers in (4, 2))
    answers = traced(deep, shallow)
    one = block(answers[0])
    assert (one.graphs, one.breaks) == (1, [])
    forward, backward = one.kernels
    assert 10 <= forward <= 14, "four matmuls, attention, and few others"
    assert forward < backward <= 30
    assert sum(one.kept) == pytest.approx(planned(deep), rel=0.005)
    plain = [answer["exact"] for answer in gpu.on_gpu([(deep, 0), (shallow, 0)], compiles=False)]
    compiled, in_python = (
        (more["memory"]["at_peak"]["activations"] - less["memory"]["at_peak"]["activations"]) / 2
        for more, less in (answers, plain)
    )
    assert compiled == pytest.approx(planned(deep), rel=0.005)
    assert in_python > 1.3 * compiled


def test_breaks_are_found_and_blocks_that_are_not_compiled() -> None:
    """Where a layer communicates the graph ends; recomputation around such a layer leaves no graph at all."""
    cut, again, experts = (
        recipe_of(layout, arch)
        for layout, arch in (("tp=2", "llama"), ("tp=2,recompute=full", "llama"), ("dp=1", "moe"))
    )
    first, second, third = map(block, traced(cut, again, experts))
    assert first.graphs == 5
    assert [one["at"].split(":")[0] for one in first.breaks] == ["models/layers.py"] * 4
    assert {one["why"] for one in first.breaks} == {"Skip calling `torch.compiler.disable()`d function"}
    assert second.compiled
    assert (second.graphs, second.kept) == (0, [])
    assert sum(second.kernels) > 2 * sum(first.kernels)
    assert not third.compiled
    assert third.kernels[1] > third.kernels[0] > 50


def test_frozen_blocks() -> None:
    """What gets no gradient makes a kind of its own, which keeps less, down to nothing."""
    sets = [*WIDE, "model.layers=3", "train.global_batch_size=2"]
    freeze = "model.freeze=embed*,blocks.0.*,blocks.1.attention.*"
    fixed, whole = traced(recipe_of("dp=1", "llama", *sets, freeze), recipe_of("dp=1", "llama", *sets))
    first, second, third = (Block(**one) for one in fixed["blocks"].values())
    assert list(fixed["blocks"])[1] == (
        "none without gradients of its input, attention.out.weight, attention.qkv.weight"
    )
    assert (first.graphs, first.kept, first.kernels[1]) == (1, [], 0)
    assert third == block(whole)
    assert sum(second.kept) < sum(third.kept)
    less = sum(third.kept) - sum(second.kept) + sum(third.kept)
    held, trained = (answer["memory"]["at_peak"]["activations"] for answer in (fixed, whole))
    assert trained - held == pytest.approx(less, rel=0.005)


def test_blocks_that_fp8_skips_are_a_kind() -> None:
    sets = ["precision.mode=fp8", "precision.fp8_scaling=tensor", "precision.fp8_skip_last=1"]
    [answer] = traced(recipe_of("dp=1", "llama", *WIDE, *sets))
    rounded, plain = (Block(**one) for one in answer["blocks"].values())
    assert list(answer["blocks"]) == ["none", "none in bf16"]
    assert rounded.kernels > plain.kernels
    assert sum(plain.kept) != sum(rounded.kept)


def test_offload_takes_what_code_between_graphs_keeps() -> None:
    """Of each block only what is no stretch of memory stays: the halves of the feed-forward's first projection."""
    sets = [*WIDE, "layout.offload=activations", "train.global_batch_size=2"]
    more, less = traced(*(recipe_of("tp=2", "llama", *sets, f"model.layers={layers}") for layers in (4, 2)))
    stays = (more["memory"]["at_peak"]["activations"] - less["memory"]["at_peak"]["activations"]) / 2
    leaves = (more["memory"]["away"]["host"] - less["memory"]["away"]["host"]) / 2
    assert stays == pytest.approx(max(block(more).kept), rel=0.01)
    assert leaves + stays > sum(block(more).kept)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("arch", ["llama", "gpt2", "bert", "qwen3", "olmo2"])
def test_every_dense_architecture_keeps_what_the_plan_says(arch: str, mode: str) -> None:
    recipe = recipe_of(f"dp=1,recompute={mode}", arch, *WIDE)
    [answer] = traced(recipe)
    assert block(answer).graphs == 1
    assert sum(block(answer).kept) == pytest.approx(planned(recipe), rel=0.02)
