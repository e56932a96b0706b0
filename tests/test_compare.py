"""`fivefold report RUN RUN`: figures, differences and curves are those of the runs; foreign text stays text."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from observe_run import make_run
from test_observe_report import EVIL, Page

from fivefold.cli.main import main
from fivefold.observe.compare import AXES, _style, as_json, differences, page, read_runs, text
from fivefold.observe.summary import summarize
from fivefold.plan.pages.sweep import MOST_CURVES, _colored
from fivefold.recipe import flops_per_token, load


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    made = [make_run(tmp_path / "a" / "run", 60), make_run(tmp_path / "b" / "run", 120)]
    path = made[1] / "recipe.toml"
    path.write_text(path.read_text().replace("lr = 0.0025", "lr = 0.001"))
    return made


def charts(drawn: str) -> dict[str, dict]:
    """{title: data} of the charts of a page."""
    found = re.findall(r'<h3 id="[^"]*">([^<]*)</h3>.*?data-chart="([^"]*)"', drawn, re.DOTALL)
    return {title: json.loads(html.unescape(data)) for title, data in found}


def test_figures_and_differences(folders: list[Path]) -> None:
    runs = read_runs(folders)
    assert [run.name for run in runs] == ["a/run", "b/run"]
    changed = differences(runs)
    assert changed.keys() == {"train.steps", "optim.lr", "optim.warmup_steps"}
    assert changed["optim.lr"] == [0.0025, 0.001]
    for run, row in zip(runs, as_json(runs)["runs"], strict=True):
        own = summarize(run.lines)
        for key in ("loss", "val_loss", "tokens_per_s", "peak_memory_bytes", "train_s"):
            assert row[key] == own[key]
        assert row["flops"] == flops_per_token(load(run.folder / "recipe.toml").model) * own["tokens"]
    assert re.search(r"^optim.lr +0.0025 +0.001$", text(runs), re.MULTILINE)


def test_curves_over_steps_tokens_seconds_and_flops(folders: list[Path]) -> None:
    runs = read_runs(folders)
    found = charts(page(runs))
    assert len(found) == 2 * len(AXES)
    for name, factor in (("tokens", 4096), ("FLOPs", as_json(runs)["runs"][0]["flops"] / 60)):
        for line, steps in zip(found[f"Train loss over {name}"]["lines"], (60, 120), strict=True):
            assert line["x"][-1] == pytest.approx(factor * steps, rel=1e-3)
    seconds = found["Validation loss over seconds"]["lines"][1]["x"]
    assert seconds[-1] == pytest.approx(summarize(runs[1].lines)["train_s"], rel=1e-4)
    steps = found["Validation loss over step"]["lines"]
    assert [line["x"] for line in steps] == [list(range(6, 61, 6)), list(range(12, 121, 12))]


def test_a_long_and_a_short_run_share_a_logarithmic_axis(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "short", 20), make_run(tmp_path / "long", 400)])
    chart = charts(page(runs))["Train loss over tokens"]
    assert chart["log"]
    low, high = chart["span"]
    assert 0 < low < 20 * 4096 < high == 400 * 4096


def test_foreign_text_is_never_markup(folders: list[Path], tmp_path: Path) -> None:
    harmless = Page(page(read_runs(folders)))
    folders[0].rename(evil := tmp_path / "<b onclick=alert(3)>&run")
    path = evil / "recipe.toml"
    path.write_text(re.sub(r'source = ".*"', lambda _: f"source = {json.dumps(EVIL)}", path.read_text()))
    broken = Page(page(read_runs([evil, folders[1]])))
    assert "run has no recipe that this version reads." in broken.text, "a source has no NUL"
    path.write_text(path.read_text().replace("\\u0000", ""))
    found = Page(page(read_runs([evil, folders[1]])))
    assert {tag for tag, _ in found.tags} == {tag for tag, _ in harmless.tags}
    assert not [a for _, a in found.tags if any(name.startswith("on") for name in a)]
    assert "The data differ, so validation losses are of different texts." in found.text


def test_the_command(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def report(*arguments: object) -> int:
        with pytest.raises(SystemExit) as stop:
            main(["report", *map(str, arguments)])
        return int(stop.value.code or 0)

    assert report(*folders) == 0
    assert "comparison.html" in capsys.readouterr().out
    assert report(*folders, "--out", "both.html", "--json") == 0
    assert json.loads(capsys.readouterr().out)["report"] == "both.html"
    assert (tmp_path / "both.html").read_text().startswith("<!DOCTYPE html>")
    for arguments, said in (
        ((folders[0], folders[0]), "is given twice"),
        ((folders[0], tmp_path / "none"), "is not a run: there is no such folder"),
        ((folders[0], "--out", "x.html"), "the page of one run or sweep lies in its folder"),
        ((folders[0], "--hold-out", "largest"), "only a sweep has a fit"),
        ((*folders, "--out", "no/x.html"), "cannot be written: there is no folder no"),
    ):
        assert report(*arguments) == 2
        assert said in capsys.readouterr().err


def test_the_lowest_loss_is_marked_only_where_losses_compare(folders: list[Path]) -> None:
    assert "<td class=best>" in page(read_runs(folders))
    path = folders[0] / "recipe.toml"
    path.write_text(re.sub(r'source = ".*"', 'source = "other.txt"', path.read_text()))
    drawn = page(read_runs(folders))
    assert "The data differ" in drawn
    assert "<td class=best>" not in drawn


def test_each_run_of_a_sweep_that_is_drawn_has_its_own_style(folders: list[Path]) -> None:
    run = read_runs(folders)[0]
    runs = [replace(run, folder=Path(str(i)), name=str(i), color=i) for i in range(40)]
    styles = [_style(one) for one in _colored(runs)]
    drawn = [one for one in styles if one]
    assert len(drawn) == len(set(drawn)) == MOST_CURVES
