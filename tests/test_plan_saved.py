"""What a search saves is trained and verified as it stands."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.data import prepare
from fivefold.observe.metrics import read_metrics
from fivefold.recipe import load
from fivefold.sharding.layout import Layout
from fivefold.train.start import run_command
from fivefold.train.verify import verify

RECIPE = """
[model]
layers = 4
dim = 64
heads = 4
seq_len = 32
[data]
source = "{text}"
tokenizer = "bytes"
cache = "{cache}"
[train]
steps = 1
global_batch_size = 8
[layout]
dp_replicate = 2
"""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The best layout of two devices, as the command line saves it."""
    text, recipe, best = tmp_path / "text.txt", tmp_path / "tiny.toml", tmp_path / "best.toml"
    text.write_text("".join(f"{i} squared is {i * i}, and the next one follows. " for i in range(600)))
    recipe.write_text(RECIPE.format(text=text, cache=tmp_path / "cache"))
    options = ["--cluster", "h100:2", "--save", str(best), "--json", "--top", "1"]
    result = CliRunner().invoke(app, ["plan", "search", str(recipe), *options])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["plans"][0]
    loaded = load(best)
    assert Layout.from_recipe(loaded.layout).ranks == found["ranks"] == 2
    assert loaded.train.microbatch_size == found["microbatch_size"]
    assert loaded.precision.mode == found["precision"]
    return best


@pytest.mark.slow
def test_it_trains_as_it_was_planned(saved: Path, tmp_path: Path) -> None:
    recipe = load(saved)
    prepare(recipe)
    out = run_command(recipe, out=tmp_path / "run", fork=False)
    lines = [line for line in read_metrics(out / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == [1]
    assert load(out / "recipe.toml").layout == recipe.layout


@pytest.mark.slow
def test_verify_accepts_it(saved: Path) -> None:
    report = verify(load(saved), steps=1)
    assert report is not None
    assert report.passed
