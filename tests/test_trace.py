"""A trace counts what a real rank has, sends and computes: every byte of every category."""

import json
import sys
from pathlib import Path

import pytest
import torch
from marks import all_but, only, slow_but
from ranks import run_ranks
from steps import Evenly, Numbers
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.errors import UserError
from fivefold.launch.ranks import Ranks
from fivefold.recipe import Recipe, load, microbatches_per_step, resolve
from fivefold.schedules.pipeline import SCHEDULES
from fivefold.sharding.layout import Layout
from fivefold.step.state import build_state
from fivefold.step.step import take_step
from fivefold.train.share import share_of
from fivefold_plan.trace import depth
from fivefold_plan.trace.depth import CachedFigures, depths, exact, extrapolate, fewer, sizes
from fivefold_plan.trace.fake import DispatchMode, Fake, FakeMode, done_work
from fivefold_plan.trace.memory import Tracker, states_of
from fivefold_plan.trace.step import Traced, trace
from fivefold_plan.trace.traffic import Collectives, flops_of

V, T, B = 96, 32, 16
TINY = [
    "model.layers=4", "model.dim=32", "model.heads=4", "model.kv_heads=2", "model.ffn_dim=80", f"model.seq_len={T}",
    f"model.vocab_size={V}", f"train.global_batch_size={B}", "train.microbatch_size=2", "train.sample_every=0",
    "train.steps=4", "optim.warmup_steps=0", "model.tie_embeddings=true", "data.document_masks=true",
]  # fmt: skip
MOE = ["model.arch=moe", "model.experts=4", "model.experts_per_token=2"]
DEEPSEEK = ["model.arch=deepseek", "model.kv_heads=4", "model.experts=4"]
LAYOUTS = [
    "dp=1", "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "tp=2,sp=true", "pp=2,schedule=1f1b",
    "pp=2,schedule=zbv,virtual_stages=2", "cp=2", "cp=2,cp_method=ulysses",
    "cp=2,cp_method=all_gather", "dp=2,ep=2", "dp=2,recompute=full",
    "tp=2,sp=true,recompute=selective",
    "tp=2,sp=true,sp_regather=true,recompute=ops:attention+gate+norm", "dp_replicate=2,dp_shard=2,zero=3",
    "dp=2,tp=2,zero=2", "tp=2,sp=true,tp_chunks=2",
]  # fmt: skip
LONGER = {
    "tp=2", "tp=2,sp=true", "tp=2,sp=true,recompute=selective", "dp=2,tp=2,zero=2", "dp=2", "dp=2,zero=1",
    "dp=2,recompute=full", "pp=2,schedule=1f1b", "dp_replicate=2,dp_shard=2,zero=3", "dp=2,zero=2",
    "cp=2,cp_method=ulysses", "cp=2,cp_method=all_gather", "tp=2,sp=true,tp_chunks=2",
}  # fmt: skip
"""Layouts whose parts others have, too: `make test-all`."""
EIGHT = [
    "dp=2,tp=2,pp=2,zero=1,schedule=1f1b",
    "dp=2,tp=2,pp=2,sp=true,sp_regather=true,zero=3,schedule=zbv,virtual_stages=2",
]


def recipe_of(layout: str, mode: str = "fp32", *overrides: str) -> Recipe:
    base = [*TINY, f"precision.mode={mode}", *(MOE if "ep=" in layout else []), *overrides]
    return resolve(load("quickstart", base, layout), vocab_size=V)


class Flops(DispatchMode):
    """Counts the FLOPs of what runs inside."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.total += flops_of(func, args, kwargs or {}, out)
        return out


def measured(rank: int, world: int, recipe: Recipe) -> Traced:
    """The second step of training, on a rank that is there. The first one has one microbatch a rank, but where it makes
    what leaves the device."""
    state = build_state(recipe, Ranks(rank, world, rank, world, torch.device("cpu")))
    B, rows = recipe.train.microbatch_size or 1, recipe.train.global_batch_size
    few = rows if state.parallel.activations else B * state.mesh.axis("dp").size

    try:
        with Evenly(state.mesh.index("ep")):
            take_step(state, recipe, share_of(Numbers(recipe), 0, few, B, state.mesh))
            share = share_of(Numbers(recipe), 1, rows, B, state.mesh)
            with Tracker(states_of(state)) as memory, Collectives(state.mesh) as sent, Flops() as flops:
                take_step(state, recipe, share)
    finally:
        state.parallel.close()
    found = {key: (calls, size) for key, (calls, size) in sorted(sent.found.items())}
    return Traced(memory.peak(), found, flops.total)


def compare(recipe: Recipe) -> Traced:
    layout = Layout.from_recipe(recipe.layout)
    alone = layout.ranks == 1
    real = [measured(0, 1, recipe)] if alone else run_ranks(layout.ranks, measured, recipe, timeout_s=60)
    count = microbatches_per_step(recipe)
    for rank, wanted in enumerate(real):
        assert trace(recipe, rank, count) == wanted, f"rank {rank}"
        assert wanted.memory.total == sum(wanted.memory.at_peak.values())
        if layout.offload == "none":
            assert wanted.memory.at_peak["optimizer"] >= 2 * wanted.memory.at_peak["params"] // 3
    return real[0]


@all_but(
    "cp=2-bf16", "dp=2,ep=2-bf16", "tp=2,sp=true,sp_regather=true,recompute=ops:attention+gate+norm-bf16"
)
@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        *(
            pytest.param(layout, "bf16", marks=pytest.mark.slow if layout in LONGER else ())
            for layout in LAYOUTS
        ),
        *(pytest.param(layout, "fp32", marks=pytest.mark.slow) for layout in LAYOUTS),
    ],
)
def test_trace_is_the_real_step(layout: str, mode: str) -> None:
    compare(recipe_of(layout, mode))


LARGE = ["model.dim=64", "model.seq_len=512", "model.vocab_size=512"]
"""A model of which some activations are large enough to leave the device."""


@pytest.mark.parametrize(
    ("offload", "layout", "mode"),
    [
        ("activations", "dp=1", "bf16"),
        ("states:host", "dp=1", "bf16"),
        ("all:disk", "dp=1", "bf16"),
        ("states:disk", "dp=1", "bf16_pure"),
        pytest.param("activations", "tp=2,recompute=full", "bf16", marks=pytest.mark.slow),
        pytest.param("states:host", "tp=2,sp=true", "bf16", marks=pytest.mark.slow),
        pytest.param("states:disk", "dp=2,zero=3", "bf16", marks=pytest.mark.slow),
        pytest.param("all:disk", "dp=1", "bf16_pure", marks=pytest.mark.slow),
    ],
)
def test_trace_of_offload(offload: str, layout: str, mode: str, tmp_path: Path) -> None:
    """On a CPU nothing lies beside the device but files."""
    sets = [
        *LARGE,
        f"layout.offload={offload}",
        f"layout.offload_dir={tmp_path}",
        "train.global_batch_size=4",
    ]
    recipe = recipe_of(layout, mode, *sets)
    found = compare(recipe)
    assert (found.memory.away["disk"] > 0, found.memory.away["host"]) == ("disk" in offload, 0)


CONSTANT = [
    "tp=2,recompute=full", "tp=2,sp=true", "cp=2", "dp=2", "dp=2,zero=1", "dp=2,zero=3", "dp=2,zero=3,recompute=full",
    "dp=1,recompute=full,offload=states:host", "dp=2,zero=3,offload=states:host",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", CONSTANT)
def test_buffers_are_constant(layout: str) -> None:
    """C_B of ZeRO-R (arXiv 1910.02054): what is sent, received, gathered and streamed takes at most as much memory with
    8 blocks as with 2, while the model's memory grows."""
    found = []
    for blocks in (2, 8):
        recipe = recipe_of(layout, "bf16", *LARGE, f"model.layers={blocks}", "train.global_batch_size=4")
        found.append(trace(recipe, 0, microbatches_per_step(recipe)).memory)
    few, many = (memory.highest["buffers"] for memory in found)
    assert few > 2**20
    assert abs(many - few) < 0.05 * few
    assert found[1].total > 1.3 * found[0].total


@pytest.mark.slow
@pytest.mark.parametrize("layout", slow_but(EIGHT[:1], EIGHT))
def test_trace_is_the_real_step_on_eight_ranks(layout: str) -> None:
    compare(recipe_of(layout, "bf16"))


@only("bert")
@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        ("dp=2", ["model.arch=gpt2", "model.kv_heads=4", "model.dropout=0.1"]),
        ("dp=2", ["model.tie_embeddings=false", "precision.reduce=bf16"]),
        ("dp=2", [*MOE, "model.capacity_factor=1.0", "model.shared_experts=1"]),
        ("dp=2", ["model.arch=bert", "model.kv_heads=4"]),
        pytest.param("tp=2", ["model.arch=qwen3", "model.head_dim=12"], marks=pytest.mark.slow),
        pytest.param("tp=2,sp=true,recompute=selective", ["model.arch=olmo2"], marks=pytest.mark.slow),
        pytest.param(
            "tp=2,sp=true", [*DEEPSEEK, "model.nope_dim=7", "model.value_dim=5"], marks=pytest.mark.slow
        ),
    ],
    ids=["gpt2", "untied", "moe", "bert", "qwen3", "olmo2", "deepseek"],
)
def test_trace_of_other_models(layout: str, overrides: list[str]) -> None:
    compare(recipe_of(layout, "bf16", *overrides))


@only("pp=2,schedule=1f1b")
@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,zero=3",
        *(
            pytest.param(layout, marks=pytest.mark.slow)
            for layout in ("dp=2,zero=1", "tp=2,sp=true,recompute=full", "dp=2,offload=all:host")
        ),
        "pp=2,schedule=1f1b",
    ],
)
def test_small_models_say_what_a_deep_one_does(layout: str) -> None:
    """Of all categories, messages and FLOPs; but of ZeRO 0, whose buckets end where a parameter does."""
    compare_with_small(layout, 0, layers=20, batch=32)


@pytest.mark.slow
@pytest.mark.parametrize("rest", [0, 3])
@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_few_microbatches_say_what_many_do(
    schedule: str, rank: int, rest: int, request: pytest.FixtureRequest
) -> None:
    """For every schedule, with and without a remainder, which interleaved schedules spread over their rounds. Without
    documents: those of many microbatches are among the tokens that make a peak come earlier."""
    if (schedule, rest, rank) == ("interleaved", 3, 0):
        reason = (
            "with many microbatches their tokens make the peak come earlier in the step (see trace/depth.py)"
        )
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    chunks = max(1, min(2, SCHEDULES[schedule].stages[1] or 2))
    layout = f"pp=4,schedule={schedule},virtual_stages={chunks}"
    layers = 16 * chunks // SCHEDULES[schedule].copies
    compare_with_small(layout, rank, layers, batch=2 * (40 + rest), masks=False)


def compare_with_small(layout: str, rank: int, layers: int, batch: int, masks: bool = True) -> None:
    sets = (
        f"model.layers={layers}",
        f"train.global_batch_size={batch}",
        f"data.document_masks={masks}".lower(),
    )
    recipe = recipe_of(layout, "bf16", *sets)
    chosen = Layout.from_recipe(recipe.layout)
    count = microbatches_per_step(recipe)
    depths_ = depths(recipe.model, chosen, chosen.coordinates(rank)["pp"])
    counts = fewer(count, chosen)
    assert len(depths_) == 2
    assert max(depths_) < layers
    if SCHEDULES[chosen.schedule].varies:  # its middle repeats nothing: all microbatches are traced
        assert counts == (count,)
    else:
        assert len(counts) == 2
        assert max(counts) < count

    def small(L: int, m: int) -> Traced:
        model = recipe.model.model_copy(update={"layers": L})
        return trace(recipe.model_copy(update={"model": model}), rank, m)

    steps = {(L, m): small(L, m) for L in depths_ for m in counts}
    assert extrapolate(steps, layers, count) == trace(recipe, rank, count)


def test_small_things_are_traced_as_they_are() -> None:
    recipe = recipe_of("dp=2")
    assert sizes(recipe, 0) == ((4,), (4,))
    found = exact(recipe, 1)
    assert not found.extrapolated
    hook = sys.excepthook
    assert found.step == trace(recipe, 1, 4)
    assert sys.excepthook is hook


def test_sizes_are_the_least_work() -> None:
    """Two small numbers of microbatches also where the small depths alone would do, unless they are no less work."""
    many, few = (
        recipe_of("dp=2,zero=1", "bf16", "model.layers=32", f"train.global_batch_size={4 * count}")
        for count in (40, 5)
    )
    assert sizes(many, 0) == ((3, 4), (2, 3))
    assert sizes(few, 0) == ((3, 4), (5,))


@pytest.mark.parametrize("sets", [["model.freeze=blocks.[0-9].*"], ["precision.fp8_skip_last=2"]])
def test_blocks_of_several_kinds_are_all_traced(sets: list[str]) -> None:
    """But those that differ in experts only are extrapolated."""
    several = recipe_of("dp=2,zero=1", "fp8", "model.layers=64", *sets)
    assert sizes(several, 0)[0] == (64,)
    mixed = recipe_of("dp=2,zero=1", "bf16", "model.layers=64", *DEEPSEEK, "model.dense_layers=2")
    assert sizes(mixed, 0)[0] == (3, 4)


def test_flops_are_those_of_the_formula() -> None:
    """6 N a token and causal attention; one block of queries sees all keys, so its half is not left out."""
    recipe = recipe_of("dp=1")
    found = exact(recipe)
    hidden = 6 * recipe.model.layers * recipe.model.dim * T * B * T  # computed, and masked
    assert found.step.flops == found.formula + hidden


def test_a_rank_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"rank 2: layout 'dp=2' has 2 ranks, 0 to 1. Nearest valid: 1"):
        exact(recipe_of("dp=2"), 2)


def test_host_syncs_are_counted_where_they_are() -> None:
    """A dense step reads its figures once. Experts with a capacity choose rows in every microbatch and block."""
    [(operation, place)] = found = trace(recipe_of("dp=1"), 0, 3).syncs
    assert (operation, place.split(":")[0], found[operation, place]) == ("item", "step/step.py", 1)
    mixed = trace(recipe_of("dp=1", "fp32", *MOE, "model.capacity_factor=1.0"), 0, 3).syncs
    assert {
        (op, at.split(":")[0]): times for (op, at), times in mixed.items() if at.startswith("models/")
    } == {("index", "models/mixture.py"): 3 * 4}


def test_figures_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By recipe and rank; what is broken is made anew."""
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path))
    recipe = recipe_of("dp=2")
    first = exact(recipe, 1)
    [path] = (tmp_path / "traces").iterdir()
    monkeypatch.setattr(depth, "trace", lambda *_: pytest.fail("it is there already"))
    assert exact(recipe, 1).as_json() == first.as_json() | {"seconds": pytest.approx(0, abs=5)}
    monkeypatch.undo()
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path))
    for broken in ("", "[]", "{}", '{"memory": 3}'):
        path.write_text(broken)
        assert exact(recipe, 1).step == first.step
    assert exact(recipe, 0).rank == 0
    assert len(list((tmp_path / "traces").iterdir())) == 2


def test_figures_are_kept_by_the_dtype_that_auto_means(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, paths = recipe_of("dp=1", "auto"), set()
    for fast in (True, False):
        monkeypatch.setattr("fivefold.step.state.has_fast_bf16", lambda _, fast=fast: fast)
        paths.add(CachedFigures(recipe, 0).path)
    assert len(paths) == 2


def command(*arguments: str) -> str:
    sets = [part for text in [*TINY, "precision.mode=bf16"] for part in ("--set", text)]
    chosen = ["--layout", "dp=2,zero=3", "--cluster", "h100:2"]
    result = CliRunner().invoke(app, ["plan", "trace", "quickstart", *sets, *chosen, *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_command_shows_both() -> None:
    text = command("--rank", "1")
    for words in ("exact figures of rank 1", "at the peak", "predicted", "all_gather", "FLOPs"):
        assert words in text
    said = json.loads(command("--rank", "1", "--json"))
    found = said["exact"]
    assert said["memory"]["source"] == "formula"
    assert found["rank"] == 1
    assert found["memory"]["peak_bytes"] == sum(found["memory"]["at_peak"].values())
    assert {"operation", "axis", "calls", "bytes"} == set(found["communication"][0])


def test_what_is_used_of_pytorch_that_is_not_documented() -> None:
    """Raising torch: each private name of `trace/` is there, and does what its line says."""
    with FakeMode():
        fake = torch.empty(3, 4)
        product = fake @ fake.T
    assert isinstance(product, Fake)
    assert (product.shape, product.device.type, product.untyped_storage().nbytes()) == ((3, 3), "cpu", 36)
    assert done_work([torch.ones(2)]) is not None
    with FakeMode() as mode:
        assert _get_current_dispatch_mode_stack() == [mode]
    with FakeTensorMode():
        assert isinstance(torch.empty(3), FakeTensor)
    assert fake_tensor.init_gpu_context(torch.device("cpu")) is None
    x = torch.ones(2, requires_grad=True)
    with Tracker() as tracker:
        (x * 2).sum().backward()
    assert [kind for kind, *_ in tracker.phases] == ["forward", "backward"]
