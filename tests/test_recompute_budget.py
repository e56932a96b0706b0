"""A budget of recomputation: resolved before the run, kept by the exact instrument and by a run, no slower than needed;
the gradients are the same bits."""

import itertools
import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from marks import only
from ranks import run_ranks
from test_predicted_runs import recipe_of as run_recipe
from test_recompute import gradients, recipe_of
from test_trace import recipe_of as traced_recipe
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.errors import UserError
from fivefold.models.recomputation import budget_of, of_blocks, runs_of
from fivefold.recipe import Recipe, change, load, microbatches_per_step
from fivefold.sharding.layout import Layout
from fivefold.train.start import run_command
from fivefold_plan import predict as planner
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.cluster.devices import of_table
from fivefold_plan.cluster.measured import assumed_table
from fivefold_plan.predict import budget, predict, priced_here, within
from fivefold_plan.search.search import search
from fivefold_plan.setting import FIVEFOLD_CPU
from fivefold_plan.trace.step import trace


def test_modes_of_blocks_are_text() -> None:
    assert of_blocks("full*2/none*1/ops:gate+norm*1", 4) == ("full", "full", "none", "ops:gate+norm")
    assert of_blocks("ops:gate", 2) == ("ops:gate", "ops:gate")
    assert runs_of(["full", "full", "none"]) == "full*2/none*1"
    assert runs_of(["none", "none"]) == "none"
    assert budget_of("budget:6GiB") == 6 * 2**30
    assert budget_of("budget:1.5MiB") == 1.5 * 2**20
    assert budget_of("full") is None
    with pytest.raises(
        UserError,
        match=re.escape('has modes of 3 blocks, but the model has 4. Nearest valid: "full*2/none*2"'),
    ):
        of_blocks("full*2/none*1", 4)
    for wrong in ("budget:6", "budget:-1GiB", "full*2/nun*2", "full*0/none*4", "full/none*3"):
        with pytest.raises(UserError, match=r"layout\.recompute = "):
            load("quickstart", ["model.layers=4", f"layout.recompute={wrong}"])


@pytest.mark.parametrize(
    ("layout", "arch"),
    [
        ("dp=1", "gpt2"), ("pp=2,schedule=zbv,virtual_stages=2", "llama"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("dp=1", "bert"), ("tp=2,sp=true", "llama"), ("dp=2,ep=2", "moe"), ("dp=2,zero=3", "llama"),
        )),
    ],
)  # fmt: skip
def test_blocks_of_different_modes_give_the_same_gradients(layout: str, arch: str) -> None:
    recipe = recipe_of(layout, "precision.mode=bf16", *([f"model.arch={arch}"] if arch != "moe" else []))
    world = Layout.from_recipe(recipe.layout).ranks
    mixed = change(recipe, ["layout.recompute=full*1/ops:gate+norm*1/selective*1/none*1"])
    wanted = run_ranks(world, gradients, recipe, timeout_s=60)
    got = run_ranks(world, gradients, mixed, timeout_s=60)
    for (found, _), (plain, _) in zip(got, wanted, strict=True):
        assert all(torch.equal(found[name], plain[name]) for name in plain)


def on_cpu(recipe: Recipe):
    return replace(of_table(assumed_table(4)), devices=None), FIVEFOLD_CPU


CASES = [
    ("dp=1", ["model.arch=gpt2", "model.kv_heads=4", "model.dropout=0.1"]), ("dp=2,zero=3", []),
    ("pp=4,schedule=1f1b", []),
]  # fmt: skip
MORE = [("dp=1", []), ("tp=2,sp=true", []), ("pp=2,schedule=zbv,virtual_stages=2", []), ("dp=2,ep=2", [])]


@only("dp=1*", "pp=4*")
@pytest.mark.parametrize(
    ("layout", "more"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_the_traced_peak_is_within_the_budget(layout: str, more: list[str]) -> None:
    """Budgets between what full recomputation needs and what none needs."""
    sizes = ["model.layers=8", "model.seq_len=128", "train.global_batch_size=32", "train.microbatch_size=4"]
    recipe = traced_recipe(layout, "bf16", *sizes, *more)
    ranks, count = Layout.from_recipe(recipe.layout).ranks, microbatches_per_step(recipe)
    cluster, software = on_cpu(recipe)

    def total(how: str) -> float:
        found = predict(change(recipe, [f"layout.recompute={how}"]), cluster.for_ranks(ranks), software)
        return max(one.total for one in found.memory)

    low, high = total("full"), total("none")
    chosen = []
    for share in (0.3, 0.8):
        allowed = int((low + share * (high - low)) / 0.95)
        found = budget(change(recipe, [f"layout.recompute=budget:{allowed}B"]), cluster, software)
        assert found is not None
        chosen.append(found.recompute)
        resolved = change(recipe, [f"layout.recompute={found.recompute}"])
        peaks = [trace(resolved, rank, count).memory.total for rank in range(0, ranks, max(1, ranks // 2))]
        assert max(peaks) <= allowed, found.recompute
        assert found.peak > low, "it keeps something"
    assert len(set(chosen)) > 1


def test_an_impossible_budget_names_the_smallest() -> None:
    recipe = change(traced_recipe("dp=1", "bf16", "model.layers=8"), ["layout.recompute=budget:1KiB"])
    with pytest.raises(UserError, match="is too small for this layout") as error:
        budget(recipe, *on_cpu(recipe))
    nearest = re.findall(r'Nearest valid: "(.*)"', str(error.value))[0]
    found = budget(change(recipe, [f"layout.recompute={nearest}"]), *on_cpu(recipe))
    assert found is not None
    assert found.peak <= 0.95 * budget_of(nearest)


def test_no_choice_of_modes_within_the_budget_is_much_faster() -> None:
    """Of four blocks, all choices of four modes."""
    sets = ["model.vocab_size=32000", "model.layers=4", "train.microbatch_size=4", "precision.mode=bf16"]
    recipe, cluster = load("llama-7b", sets, "dp=1"), parse("h100:1")

    def of(how: str):
        return predict(change(recipe, [f"layout.recompute={how}"]), cluster)

    low, high = of("full").peak_bytes, of("none").peak_bytes
    for share in (0.25, 0.5, 0.75):
        allowed = int(low + share * (high - low))
        ours = of(f"budget:{int(allowed / 0.95)}B")
        assert ours.peak_bytes <= allowed * 1.0001
        modes = ("none", "ops:norm", "ops:gate+norm", "full")
        others = [of(runs_of(some)) for some in itertools.combinations_with_replacement(modes[::-1], 4)]
        best = min(plan.step.seconds for plan in others if plan.peak_bytes <= allowed)
        assert ours.step.seconds <= 1.03 * best, "one block's recomputation at most"


def test_the_search_recomputes_no_more_than_it_must() -> None:
    sets = [
        "model.vocab_size=32000",
        "train.global_batch_size=8",
        "model.layers=8",
        "train.microbatch_size=none",
    ]
    recipe, roomy = load("llama-7b", [*sets, "model.seq_len=8192"], "dp=1"), parse("h100:2")
    small = replace(roomy, device=replace(roomy.device, memory=24 * 2**30))
    found = search(recipe, small, 5)
    first = found.plans[0]
    assert "*" in first.layout.recompute, "some blocks"
    assert all(plan.fits for plan in found.plans)
    assert found.plans == sorted(found.plans, key=lambda plan: plan.step.seconds)
    least = next(p for p in found.plans if "*" in p.layout.recompute)
    again = within(
        planner.price(replace(least.setting, layout=replace(least.layout, recompute="full"))), first.limit
    )
    assert again.step.seconds == pytest.approx(least.step.seconds, rel=1e-6)


def test_a_run_stays_within_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "load_table", assumed_table)
    sizes = ["model.seq_len=256", "model.vocab_size=257", "train.microbatch_size=4", "train.steps=2"]
    recipe = run_recipe(tmp_path, "dp=1", *sizes)
    whole, least = (
        predict(
            change(recipe, [f"layout.recompute={how}"]), replace(of_table(assumed_table()), devices=1)
        ).peak_bytes
        for how in ("none", "full")
    )
    allowed = int((whole + least) / 2 / 0.95)
    run_command(change(recipe, [f"layout.recompute=budget:{allowed}B"]), out=tmp_path / "run", fork=False)
    kept = tomllib.loads((tmp_path / "run" / "recipe.toml").read_text())["layout"]["recompute"]
    assert len(of_blocks(kept, 4)) == 4
    assert kept not in ("none", "full")
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert 0.8 * allowed < plan["measured"]["memory_bytes"] <= allowed


def test_check_and_plan_show_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "load_table", lambda: None)
    recipe = ["llama-7b", "--set", "model.vocab_size=32000", "--layout", "dp=8,zero=3,recompute=budget:40GiB"]
    result = CliRunner().invoke(app, ["check", *recipe, "--no-data", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)["recompute"]
    assert "*" in found["blocks"]
    assert found["predicted_peak_bytes"] < 40 * 2**30
    result = CliRunner().invoke(app, ["plan", *recipe, "--cluster", "h100:8", "--json"])
    plan = json.loads(result.output)
    assert len(set(plan["recompute"])) > 1
    assert plan["memory"]["peak_bytes"] <= 0.95 * 40 * 2**30
    assert priced_here()[1] is FIVEFOLD_CPU
