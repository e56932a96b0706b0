"""`fivefold report RUN RUN`: figures, differences and curves are those of the runs; foreign text stays text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from observe_run import make_run
from test_observe_report import EVIL, Page
from test_play_recorded import unpacked

from fivefold.cli.main import main
from fivefold.observe.compare import (
    AXES,
    SMALLEST_IS_BEST,
    as_json,
    best,
    differences,
    drawn,
    read_runs,
    side_by_side,
    text,
)
from fivefold.observe.summary import summarize
from fivefold.recipe import flops_per_token, load
from fivefold.recipe.sweep import FINISHED, Row, Sweep
from fivefold_plan.advice.scaling import results
from fivefold_plan.pages.sweep import view
from fivefold_play import recorded


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    made = [make_run(tmp_path / "a" / "run", 60), make_run(tmp_path / "b" / "run", 120)]
    path = made[1] / "recipe.toml"
    path.write_text(path.read_text().replace("lr = 0.0025", "lr = 0.001"))
    return made


def test_figures_and_differences(folders: list[Path]) -> None:
    runs = read_runs(folders)
    assert [run.name for run in runs] == ["a/run", "b/run"]
    changed = differences(runs)
    steps = {
        "train.steps",
        "train.val_every",
        "train.sample_every",
    }  # the last two follow from a run's length
    assert changed.keys() == {*steps, "optim.lr", "optim.warmup_steps"}
    assert changed["optim.lr"] == [0.0025, 0.001]
    for run, row in zip(runs, as_json(runs)["runs"], strict=True):
        own = summarize(run.lines)
        for key in ("loss", "val_loss", "tokens_per_s", "peak_memory_bytes", "train_s"):
            assert row[key] == own[key]
        assert row["flops"] == flops_per_token(load(run.folder / "recipe.toml").model) * own["tokens"]
    assert re.search(r"^optim.lr +0.0025 +0.001$", text(runs), re.MULTILINE)


def test_long_values_differ_on_the_page(folders: list[Path]) -> None:
    sources = ["a" * 50 + end for end in "bc"]
    for folder, source in zip(folders, sources, strict=True):
        path = folder / "recipe.toml"
        path.write_text(re.sub(r'source = ".*"', f'source = "{source}"', path.read_text()))
    assert side_by_side(read_runs(folders))["differences"]["data.source"] == sources


def test_curves_over_steps_tokens_seconds_and_flops(folders: list[Path]) -> None:
    runs = read_runs(folders)
    found = {axis: drawn(runs, axis, 1000) for axis in AXES}
    for name, factor in (("tokens", 4096), ("FLOPs", as_json(runs)["runs"][0]["flops"] / 60)):
        for curve, steps in zip(found[name]["curves"].values(), (60, 120), strict=True):
            assert curve["loss"][0][-1] == pytest.approx(factor * steps, rel=1e-3)
    seconds = found["seconds"]["curves"][str(folders[1])]["val_loss"][0]
    assert seconds[-1] == pytest.approx(summarize(runs[1].lines)["train_s"], rel=1e-4)
    steps = [curve["val_loss"][0] for curve in found["step"]["curves"].values()]
    assert steps == [list(range(6, 61, 6)), list(range(12, 121, 12))]
    assert not any(one["spread"] for one in found.values())
    few = drawn(runs, "step", 10)["curves"][str(folders[1])]["loss"]
    assert [len(values) for values in few] == [10, 10]


def test_a_long_and_a_short_run_share_a_logarithmic_axis(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "short", 20), make_run(tmp_path / "long", 400)])
    found = drawn(runs, "tokens", 1000)
    assert found["spread"]
    ends = [min(x for one in found["curves"].values() for x in one["loss"][0]), 20 * 4096, 400 * 4096]
    assert ends == sorted(ends)
    assert ends[0] >= 4096


def test_losses_of_each_validation_set_are_drawn(folders: list[Path]) -> None:
    with (folders[0] / "metrics.jsonl").open("a") as file:
        for step, loss in ((61, 3.0), (62, float("nan"))):
            line = {"step": step, "tokens": 4096 * step, "val_losses": {"news": loss}}
            file.write(json.dumps(line) + "\n")
    runs = read_runs(folders)
    found = side_by_side(runs) | drawn(runs, "step", 1000)
    assert found["kinds"]["val_losses/news"] == "loss on news"
    curves = [one["val_losses/news"] for one in found["curves"].values()]
    assert curves == [([61, 62], [3.0, None]), ([], [])]


def test_foreign_text_is_never_markup(folders: list[Path], tmp_path: Path) -> None:
    def page(*named: Path) -> str:
        runs = read_runs(named)
        return recorded.of_runs(runs, text(runs))

    harmless = Page(page(*folders))
    folders[0].rename(evil := tmp_path / "<b onclick=alert(3)>&run")
    path = evil / "recipe.toml"
    path.write_text(re.sub(r'source = ".*"', lambda _: f"source = {json.dumps(EVIL)}", path.read_text()))
    broken = page(evil, folders[1])
    note = "run has no recipe that this version reads."
    assert note in Page(broken).text, "a source has no NUL"
    assert note in unpacked(broken)["compared"]["notes"][0]
    path.write_text(path.read_text().replace("\\u0000", ""))
    found = Page(page(evil, folders[1]))
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


def test_the_lowest_loss_is_named_only_where_losses_compare(folders: list[Path]) -> None:
    runs = read_runs(folders)
    assert best(runs) == {key: min(run.figures[key] for run in runs) for key in SMALLEST_IS_BEST}
    path = folders[0] / "recipe.toml"
    own = path.read_text()
    for field, comparable in (("val_sequences", {"loss"}), ("seq_len", set())):
        path.write_text(re.sub(rf"(?m)^{field} = .*", f"{field} = 40", own))
        assert best(read_runs(folders)).keys() == comparable, field
    path.write_text(own)
    path.write_text(re.sub(r'source = ".*"', 'source = "other.txt"', path.read_text()))
    assert best(read_runs(folders)) == {}
    path.write_text((folders[1] / "recipe.toml").read_text().replace("vocab_size = ", "vocab_size = 1"))
    assert best(read_runs(folders)).keys() == {"val_bits_per_byte"}


def test_a_sweep_is_seen_by_its_parts(folders: list[Path], tmp_path: Path) -> None:
    """What failed, which value is best, and its runs side by side; live and as a file."""
    sweep = Sweep("quickstart", [], None, ["optim.lr=1e-3,1e-2"], [], "")
    for run, rate, loss in zip(folders, ("1e-3", "1e-2"), (3.0, 2.0), strict=True):
        run.rename(tmp_path / f"lr{rate}")
        figures = {"parameters": 1e4, "tokens": 1e5, "flops": 6e9, "val_loss": loss}
        sweep.rows.append(Row(f"lr{rate}", {"optim.lr": rate}, FINISHED, figures=figures))
    sweep.rows.append(Row("lr<b>", {"optim.lr": "1"}, "failed", "exit code 2"))
    found = view(tmp_path, results(sweep))
    assert found["lead"] == "quickstart: 2 of 3 runs are finished. They vary optim.lr."
    assert ("list", ["lr<b>: failed exit code 2"]) in found["parts"]
    assert any(part[0] == "list" and "best" in part[1][0] and "0.01" in part[1][0] for part in found["parts"])
    assert any(part[:2] == ("picture", "optim.lr") and part[2].startswith("<svg") for part in found["parts"])
    assert found["drawn"] == [str(tmp_path / "lr1e-3"), str(tmp_path / "lr1e-2")]
    page = recorded.write_sweep(tmp_path, results(sweep)).read_text()
    data = unpacked(page)
    assert data["sweep"] == json.loads(json.dumps(found))
    assert data["rows"][0]["names"] == found["drawn"]
    assert data["axes"]["step"]["curves"].keys() == {*found["drawn"]}
    assert "failed: lr&lt;b&gt; (exit code 2)" in page
    (tmp_path / "lr1e-2" / "recipe.toml").unlink()
    (tmp_path / "lr1e-2" / "metrics.jsonl").unlink()
    (tmp_path / "lr1e-2").rename(tmp_path / "elsewhere")
    gone = view(tmp_path, results(sweep))
    assert gone["parts"][0] == (
        "alarm",
        "The folders of 1 finished runs are not here, so their curves are not.",
    )
