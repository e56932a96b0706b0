"""What makes no sense gives one clear error, with a choice that is really valid."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.errors import UserError
from fivefold.recipe import Recipe, change, load
from fivefold.recipe.rules import allows
from fivefold.sharding.layout import Layout, parse
from fivefold.sharding.layout_rules import nearest, validate
from fivefold_plan.cluster.clusters import parse as parse_cluster
from fivefold_plan.predict import predict

RUNNER = CliRunner()
SETS = ["model.vocab_size=4098", "model.ffn_dim=2304", "train.microbatch_size=none"]
ODD = load(
    "llama-7b",
    [*SETS, "model.heads=12", "model.kv_heads=3", "model.dim=768", "model.layers=5", "train.global_batch_size=48"],
    "dp=1",
)  # fmt: skip


def error_of(*arguments: str) -> str:
    result = RUNNER.invoke(app, ["plan", *arguments])
    assert isinstance(result.exception, UserError), result.output
    return str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quickstart", "--cluster", "h100:0"], "0 devices; at least 1"),
        (["quickstart", "--cluster", "h100:-8"], "'-8' is not a number of devices"),
        (["quickstart", "--cluster", "h100:1e3"], "'1e3' is not a number of devices"),
        (["quickstart", "--cluster", "h100:999999999"], "999,999,999 devices; at most 1,000,000"),
        (["quickstart", "--cluster", "h10:8"], "did you mean 'h100'"),
        (["quickstart", "--cluster", "h100:2", "--set", "train.global_batch_size=-3"], "must be"),
        (["quickstart", "--cluster", "h100:2", "--set", "train.global_batch_size=nan"], "must be"),
        (["quickstart", "--cluster", "h100:2", "--set", "model.dim=1e400"], "must be"),
        (["quickstart", "--cluster", "h100:2", "--tokens", "-1"], "--tokens -1: must be above 0"),
        (
            ["quickstart", "--cluster", "h100:2", "--tokens", "inf"],
            "--tokens inf: must be above 0 and finite",
        ),
        (["quickstart", "--cluster", "h100:2", "--price", "nan"], "--price nan: must be above 0"),
        (["quickstart", "--cluster", "h100:2", "--noise-scale", "0"], "--noise-scale 0: must be above 0"),
        (["quickstart", "--cluster", "h100:2", "--deadline", "soon"], "such as 30d"),
        (["quickstart", "--cluster", "h100:2", "--deadline", "0d"], "above 0"),
        (["quickstart", "--cluster", "h100:2", "--deadline", "-3d"], "above 0"),
        (["llama-7b", "--cluster", "h100:64", "--params", "7"], "--params 7: must be between"),
        (["llama-7b", "--cluster", "h100:64", "--params", "nan"], "--params nan: must be between"),
        (["llama-7b", "--cluster", "h100:64", "--params", "1e6"], "the smallest llama has"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], message: str) -> None:
    assert message in error_of(*arguments)


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "0", "-5", '"80"', "true", "1e400"])
@pytest.mark.parametrize("key", ["memory_gb", "inter_gb_s", "bf16_tflops"])
def test_a_cluster_of_odd_numbers(tmp_path: Path, key: str, value: str) -> None:
    file = tmp_path / "odd.toml"
    file.write_text(f'base = "h100"\n{key} = {value}\n')
    assert f"{key}: must be a number above 0" in error_of("quickstart", "--cluster", f"{file}:2")


def proposals(message: str) -> list[Layout]:
    """The layouts that an error proposes."""
    texts = message.split("Nearest valid: ")[1].split(" (")[0].split(" or ")
    return [Layout(**parse(text)) for text in texts]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("layout", "devices"),
    [("tp=3", 8), ("dp=1", 8), ("dp=4", 7), ("pp=5", 10), ("cp=2", 24), ("dp=3,tp=3", 64), ("dp=2", 16), ("dp=1", 11)],
)  # fmt: skip
def test_proposed_layouts_train_this_model(layout: str, devices: int) -> None:
    """12 heads, 3 of them key-value heads, 5 blocks, 48 sequences: hardly a layout is as good as another."""
    recipe = change(ODD, [], layout)
    with pytest.raises(UserError) as error:
        predict(recipe, parse_cluster(f"h100:{devices}"))
    found = proposals(str(error.value))
    assert found
    for candidate in found:
        text = ",".join(
            f"{name}={str(value).lower()}"
            for name, value in vars(candidate).items()
            if value not in (None, "")
        )
        plan = predict(change(ODD, [], text), parse_cluster(f"h100:{candidate.ranks}"))
        assert plan.layout.ranks == candidate.ranks <= devices


def test_without_a_model_any_layout_may_be_proposed() -> None:
    assert nearest(Layout(), 7, 1) != nearest(
        Layout(), 7, 1, lambda layout: layout.pp == 1 and layout.tp == 1
    )
    with pytest.raises(UserError, match=r"Nearest valid: dp=4 \(4 ranks; the model has no layout for 7\)"):
        validate(
            Layout(dp_replicate=5), 7, lambda layout: layout.dp in (1, 2, 4) and layout.dp == layout.ranks
        )


@pytest.mark.parametrize(
    ("sets", "wanted"),
    [
        (["model.heads=5"], "model.heads = 4"),
        (["model.heads=64"], "model.heads = 48"),
        (["model.kv_heads=3"], "model.kv_heads = 2"),
        (["model.heads=8", "model.kv_heads=6"], "model.kv_heads = 4"),
    ],
)
def test_heads_that_do_not_divide(sets: list[str], wanted: str) -> None:
    """quickstart is 192 wide, with 4 heads."""
    with pytest.raises(UserError) as error:
        load("quickstart", sets)
    assert f"Nearest valid: {wanted}" in str(error.value)
    load("quickstart", [*sets, wanted.replace(" ", "")])


@pytest.mark.parametrize(
    ("batch", "layout", "sets", "wanted"),
    [
        (9, "dp=2", ["sync.method=diloco"], 8),
        (17, "dp=6", ["layout.microbatches=1"], 18),
        (1, "dp=4,zero=1", [], 4),
    ],
)
def test_batches_that_do_not_divide(batch: int, layout: str, sets: list[str], wanted: int) -> None:
    with pytest.raises(UserError, match=f"Nearest valid: train.global_batch_size = {wanted}$"):
        load("quickstart", [*sets, f"train.global_batch_size={batch}"], layout)
    load("quickstart", [*sets, f"train.global_batch_size={wanted}"], layout)


def test_a_batch_that_no_layout_of_the_cluster_divides() -> None:
    sets = [*SETS, "model.layers=1", "model.heads=3", "model.dim=384", "train.global_batch_size=6"]
    message = error_of("search", "llama-7b", "--cluster", "h100:13", *(f"--set={text}" for text in sets))
    found = re.search(r"train\.global_batch_size = (\d+), or h100:(\d+)", message)
    assert found
    for instead, cluster in ((f"train.global_batch_size={found[1]}", "13"), (sets[-1], found[2])):
        result = RUNNER.invoke(
            app,
            [
                "plan",
                "search",
                "llama-7b",
                "--cluster",
                f"h100:{cluster}",
                *(f"--set={t}" for t in [*sets, instead]),
            ],
        )
        assert result.exit_code == 0, result.output


def test_allows_asks_the_recipes_rules() -> None:
    recipe: Recipe = ODD
    assert allows(recipe, Layout(tp=3))
    assert not allows(recipe, Layout(tp=2))
    assert allows(recipe, Layout(dp_replicate=5)), "ranks may take unequally many sequences"
    assert not allows(recipe, Layout(dp_replicate=49))
