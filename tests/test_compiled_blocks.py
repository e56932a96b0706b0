"""What blocks are compiled to on a GPU, found without one: graphs, breaks, kernels, and what they keep for backward."""

import json
from collections.abc import Callable, Iterable
from inspect import signature
from pathlib import Path
from typing import Any

import gpu_blocks  # benchmarks/planner
import pytest
import torch
from families import FAMILIES, overrides
from test_trace_gpu import recipe_of
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from fivefold.models.card import card_of
from fivefold.models.recomputation import region
from fivefold.recipe import Recipe, load, resolve
from fivefold.sharding.layout import Layout
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.memory.memory import kept
from fivefold_plan.predict import predict
from fivefold_plan.trace import gpu
from fivefold_plan.trace.blocks import Block

pytestmark = pytest.mark.skipif(bool(gpu.why_not()), reason=gpu.why_not())
WIDE = [
    "model.dim=512",
    "model.ffn_dim=1536",
    "model.seq_len=1024",
    "model.vocab_size=4096",
    "model.dropout=0.0",
]


COMPILED = {
    "deep": ("dp=1", "llama", [*WIDE, "model.layers=4"]),
    "shallow": ("dp=1", "llama", [*WIDE, "model.layers=2"]),
    "cut": ("tp=2", "llama", []),
    "experts of two ranks": ("dp=2,ep=2", "moe", []),
}
EAGER = {
    "experts": ("pp=2,schedule=zbv", "moe", []),
    "experts alone": ("pp=2,schedule=zbv", "moe", ["model.shared_experts=0", "model.balance=aux"]),
    "many experts, normed heads": (
        "pp=2,schedule=zbv",
        "qwen3_moe",
        ["model.experts=32", "model.expert_ffn_dim=512"],
    ),
    "latent attention": ("pp=2,schedule=zbv", "deepseek", ["model.kv_heads=4", "model.expert_ffn_dim=128"]),
    "experts of other ranks": ("dp=2,pp=2,ep=2,schedule=zbv", "moe", []),
    "split backward": ("pp=2,schedule=zbv", "llama", []),
    "inputs in parts": ("tp=2,recompute=full,offload=activations:tp", "llama", []),
    "split backward of norms over heads": ("pp=2,schedule=zbv", "qwen3", ["model.head_dim=128"]),
    "split backward of norms over ranks": (
        "tp=2,pp=2,schedule=zbv,sp=true",
        "olmo2",
        ["model.kv_heads=4"],
    ),
    "split backward, LayerNorm": ("pp=2,schedule=zbv", "gpt2", []),
}
FEW = ("experts alone", "split backward")
TRACES = Path(gpu_blocks.__file__).parents[1] / "results/gpu_blocks.json"


def traced(*recipes: Recipe, in_python: Iterable[Recipe] = ()) -> list[dict]:
    """The answers of one process."""
    answers = gpu.on_gpu(((recipe, 0) for recipe in recipes), in_python=((recipe, 0) for recipe in in_python))
    for answer in answers:
        assert "error" not in answer, answer["error"]
    return [answer["exact"] for answer in answers]


def eager(names: Iterable[str]) -> dict[tuple[str, int], Recipe]:
    """By name and number of layers."""
    given = ((name, *EAGER[name], layers) for name in names for layers in (8, 4))
    return {
        (name, layers): recipe_of(layout, arch, *WIDE, f"model.layers={layers}", *sets)
        for name, layout, arch, sets, layers in given
    }


@pytest.fixture(scope="module")
def quick() -> tuple[dict[str, dict], dict[Any, dict]]:
    """Answers of what `make test` looks at, compiled and in Python: to start a process with PyTorch's compiler takes as
    long as half of the traces."""
    compiled = {name: recipe_of(layout, arch, *sets) for name, (layout, arch, sets) in COMPILED.items()}
    in_python = {name: compiled[name] for name in ("deep", "shallow")} | eager(FEW)
    answers = iter(traced(*compiled.values(), in_python=in_python.values()))
    return dict(zip(compiled, answers, strict=False)), dict(zip(in_python, answers, strict=True))


def block(answer: dict) -> Block:
    [only] = answer["blocks"].values()
    return Block(**only)


def planned(recipe: Recipe) -> float:
    """Bytes that the planner lets a block keep."""
    s = predict(recipe, parse(f"h100:{Layout.from_recipe(recipe.layout).ranks}")).setting
    planned = kept(s.last_block, s.recompute[-1], s.software)
    if "enable_gqa" in signature(varlen_attn).parameters or recipe.layout.recompute == "full":
        return planned
    # Before torch 2.13 each query head has keys and values of its own, which the planner does not count.
    model = recipe.model
    more = model.heads - (model.kv_heads or model.heads)
    head = 2 * model.seq_len * (model.head_dim or model.dim // model.heads)  # bytes
    return planned + 2 * head * more * (recipe.train.microbatch_size or 1)


def test_one_graph_keeps_what_the_plan_says(quick) -> None:
    """Without breaks. Each block of a traced step keeps as much, and less than in Python."""
    layout, arch, sets = COMPILED["deep"]
    one, said = block(quick[0]["deep"]), planned(recipe_of(layout, arch, *sets))
    assert (one.graphs, one.breaks) == (1, [])
    forward, backward = one.kernels
    assert 10 <= forward <= 14, "four matmuls, attention, and few others"
    assert forward < backward <= 30
    assert sum(one.kept) == pytest.approx(said, rel=0.005)
    compiled, in_python = (
        (
            found["deep"]["memory"]["at_peak"]["activations"]
            - found["shallow"]["memory"]["at_peak"]["activations"]
        )
        / 2
        for found in quick
    )
    assert compiled == pytest.approx(said, rel=0.005)
    assert in_python > 1.3 * compiled


def test_messages_end_no_graph(quick) -> None:
    one = block(quick[0]["cut"])
    assert one.compiled
    assert one.whole, one.breaks


@pytest.mark.slow
def test_recomputation_around_messages_ends_no_graph() -> None:
    recipes = [recipe_of(layout, "llama") for layout in ("tp=2", "tp=2,recompute=full")]
    first, second = map(block, traced(*recipes))
    assert second.compiled
    assert second.whole, second.breaks
    assert sum(second.kept) == planned(recipes[1])
    assert second.kernels[1] > first.kernels[1]


@pytest.mark.slow
def test_experts_are_in_the_graph() -> None:
    recipe = recipe_of("dp=1", "moe", *WIDE, "model.shared_experts=0", "model.balance=aux")
    [one] = map(block, traced(recipe))
    assert (one.graphs, one.breaks) == (1, [])
    assert max(one.kernels) < 40
    assert sum(one.kept) == pytest.approx(planned(recipe), rel=0.005)


def test_experts_of_other_ranks_end_the_graph(quick) -> None:
    """Their rows travel: the graph ends where numbers and where rows leave."""
    there = block(quick[0]["experts of two ranks"])
    assert there.graphs == 6, "one of what experts compute between messages"
    assert [one["at"].split(":")[0] for one in there.breaks] == ["models/mixture.py"] * 3


@pytest.mark.slow
def test_frozen_blocks() -> None:
    """What gets no gradient makes a kind of its own, which keeps less, down to nothing. The output layer is trained: a
    frozen one has no weight gradient beside what the blocks keep."""
    sets = [*WIDE, "model.layers=3", "train.global_batch_size=2", "model.tie_embeddings=false"]
    freeze = "model.freeze=embed*,blocks.0.*,blocks.1.attention.*"
    fixed, whole = traced(recipe_of("dp=1", "llama", *sets, freeze), recipe_of("dp=1", "llama", *sets))
    first, second, third = (Block(**one) for one in fixed["blocks"].values())
    assert list(fixed["blocks"])[1] == (
        "none, a block without gradients of its input, attention.out.weight, attention.qkv.weight"
    )
    assert (first.graphs, first.kept, first.kernels[1]) == (1, [], 0)
    assert third == block(whole)
    assert sum(second.kept) < sum(third.kept)
    less = sum(third.kept) - sum(second.kept) + sum(third.kept)
    held, trained = (answer["memory"]["at_peak"]["activations"] for answer in (fixed, whole))
    assert trained - held == less


@pytest.mark.slow
def test_copies_of_sequence_parallelism_move_what_the_plan_says() -> None:
    """Those of chunks, of what is gathered again, and of the pieces of two sequences: what a block moves beyond one
    without them. Of two sequences in chunks the trace counts whole pieces where a chunk is read."""
    base = "tp=2,sp=true"
    given = [(base, 1), *((f"{base},{more}", 1) for more in ("tp_chunks=4", "sp_regather=true,tp_chunks=4"))]
    given += [(base, 2), (f"{base},sp_regather=true", 2)]
    recipes = [recipe_of(of, "llama", *WIDE, f"train.microbatch_size={B}") for of, B in given]
    moved = list[tuple[float, float]]()
    for recipe, answer in zip(recipes, traced(*recipes), strict=True):
        ops = predict(recipe, parse("h100:2")).setting.last_block
        moved.append((sum(op.forward + op.backward for op in ops), sum(block(answer).moved)))
    for (said, found), (_, B) in zip(moved[1:], given[1:], strict=True):
        assert said - B * moved[0][0] == pytest.approx(found - B * moved[0][1], rel=0.1)


@pytest.mark.slow
def test_blocks_that_fp8_skips_are_a_kind() -> None:
    sets = ["precision.mode=fp8", "precision.fp8_scaling=tensor", "precision.fp8_skip_last=1"]
    [answer] = traced(recipe_of("dp=1", "llama", *WIDE, *sets))
    rounded, plain = (Block(**one) for one in answer["blocks"].values())
    assert list(answer["blocks"]) == ["none, a block", "none, a block in bf16"]
    assert rounded.kernels > plain.kernels
    assert sum(plain.kept) != sum(rounded.kept)


@pytest.mark.slow
def test_offload_takes_what_a_graph_keeps() -> None:
    """Of each block only what is no stretch of memory stays: the halves of the feed-forward's first projection."""
    sets = [*WIDE, "layout.offload=activations", "train.global_batch_size=2"]
    more, less = traced(*(recipe_of("tp=2", "llama", *sets, f"model.layers={layers}") for layers in (4, 2)))
    stays = (more["memory"]["at_peak"]["activations"] - less["memory"]["at_peak"]["activations"]) / 2
    leaves = (more["memory"]["away"]["host"] - less["memory"]["away"]["host"]) / 2
    assert stays == pytest.approx(max(block(more).kept), rel=0.01)
    assert leaves + stays == sum(block(more).kept)


def test_pytorch_compiles_no_checkpoint_around_a_break() -> None:
    """So the trainer does not ask it to (`Layout.compiles`)."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def sine(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    outside: Any = torch.compiler.disable(sine)

    def block(x: torch.Tensor) -> torch.Tensor:
        return outside(x.cos()).cos()

    def again(x: torch.Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=False)

    for function, count in ((block, 2), (again, 0)):
        torch._dynamo.reset()
        graphs.clear()
        torch.compile(function, backend=backend)(torch.ones(2, requires_grad=True))
        assert len(graphs) == count


REPEATED = pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="attention over documents keeps repeated keys and values, which the plan leaves out (docs/gpu.md)",
)


def check_growth(recipes: dict[tuple[str, int], Recipe], answers: dict[Any, dict]) -> None:
    """What a rank's activations grow by with each block, at the peak."""
    for name in {name for name, _ in recipes}:
        found, said = [], []
        for layers in (8, 4):
            recipe = recipes[name, layers]
            layout = Layout.from_recipe(recipe.layout)
            assert not layout.compiles(card_of(recipe.model).mixed[-1], recipe.layout.recompute), name
            found.append(answers[name, layers]["memory"]["at_peak"]["activations"])
            said.append(predict(recipe, parse(f"h100:{layout.ranks}")).memory[0].activations)
        assert said[0] - said[1] == pytest.approx(found[0] - found[1], rel=0.01), name


@REPEATED
def test_eager_blocks_keep_what_the_plan_says(quick) -> None:
    """Blocks that the trainer does not compile."""
    check_growth(eager(FEW), quick[1])


@REPEATED
@pytest.mark.slow
def test_other_eager_blocks_keep_what_the_plan_says() -> None:
    recipes = eager(name for name in EAGER if name not in FEW)
    check_growth(recipes, dict(zip(recipes, traced(in_python=recipes.values()), strict=True)))


@REPEATED
@pytest.mark.parametrize("family", gpu_blocks.LAYOUTS)
def test_blocks_keep_what_the_committed_traces_kept(family: str) -> None:
    """Of every architecture, compiled to one graph (benchmarks/planner/gpu_blocks.py)."""
    rows = [row for row in json.loads(TRACES.read_text())["rows"] if row["family"] == family]
    for row in rows:
        found = Block(**row["block"])
        said = gpu_blocks.planned_bytes(
            gpu_blocks.setting_of(gpu_blocks.recipe_of(row["arch"], row["layout"]))
        )
        assert not found.whole or said == pytest.approx(sum(found.kept), rel=0.01), row["arch"]
    assert rows


def test_compiled_code_repeats_the_matmuls_whose_results_it_does_not_keep() -> None:
    """The committed traces keep neither these results nor sums with them (the test above)."""
    again = {
        "llama": ["attention out"],
        "bert": ["attention out"],
        "olmo2": ["attention out", "down"],
        "moe": ["attention out", "experts down"],
        "deepseek": ["query up", "key-value up", "attention out", "experts down"],
    }
    for arch, names in again.items():
        s = gpu_blocks.setting_of(gpu_blocks.recipe_of(arch, gpu_blocks.LAYOUTS["recompute operations"]))
        used = region(s.recompute[-1], s.software)
        assert [op.name for op in s.last_block if op.matmul and used.repeated(op, False)] == names, arch


@pytest.mark.slow
def test_blocks_with_a_skip_are_a_kind() -> None:
    """They keep another block's output besides."""
    sizes = [
        "model.layers=2",
        "model.heads=8",
        "model.kv_heads=4",
        "model.head_dim=64",
        "precision.mode=bf16",
    ]
    batch = ["train.global_batch_size=1", "train.microbatch_size=1"]
    recipe = resolve(
        load("quickstart", ["model.arch=speedrun", *WIDE, *sizes, *batch], "dp=1"), vocab_size=4096
    )
    [answer] = traced(recipe)
    plain, skips = (Block(**one) for one in answer["blocks"].values())
    assert list(answer["blocks"]) == ["none, a block", "none, a block with a skip"]
    assert (plain.graphs, skips.graphs) == (1, 1)
    assert sum(plain.kept) == pytest.approx(planned(recipe), rel=0.01)
    assert sum(skips.kept) - sum(plain.kept) == 2 * 1024 * 512


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "arch", ["llama", "gpt2", "bert", "qwen3", "olmo2", "moe", "deepseek", "qwen3_moe", *FAMILIES]
)
def test_every_architecture_keeps_what_the_plan_says(arch: str, mode: str) -> None:
    head = ["model.head_dim=16"] if "qwen3" in arch else []  # a multiple of 8, as flash wants
    head += ["model.kv_heads=4"] if arch == "deepseek" else []
    if arch in FAMILIES:  # one block: of one kind
        head += [*overrides(arch)[1:], "model.layers=1", *(["model.head_dim=16"] if arch == "gemma3" else [])]
    recipe = recipe_of(f"dp=1,recompute={mode}", arch, *WIDE, *head)
    [answer] = traced(recipe)
    assert block(answer).graphs == 1
    assert sum(block(answer).kept) == pytest.approx(planned(recipe), rel=0.02)
