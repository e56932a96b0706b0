"""Sweeps: grids from --over, refusals before anything runs, runs that finish, fail, stop and resume."""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise
from pathlib import Path

import pytest
from pool_runs import lines
from test_observe_report import Page
from test_play_recorded import unpacked

from fivefold.cli.main import main
from fivefold.errors import UserError
from fivefold.recipe import load
from fivefold.recipe import sweep as table
from fivefold.recipe.sweep import FINISHED, STOPPED, WAITING, grid
from fivefold.train import sweep as running

TINY = [
    "model.layers=1", "model.dim=16", "model.heads=2", "model.seq_len=16", "data.tokenizer=bytes",
    "data.val_fraction=0.1", "train.global_batch_size=4", "train.val_sequences=4", "train.sample_tokens=2",
    "train.steps=3", "observe.tracker=none", "layout.dp_replicate=1",
]  # fmt: skip


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    """The arguments of a tiny sweep, without --over."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    sets = [*TINY, f"data.source={text}", f"data.cache={tmp_path / 'cache'}"]
    return ["sweep", "quickstart", "--out", str(tmp_path / "sweep"), *(w for s in sets for w in ("--set", s))]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return int(stop.value.code or 0)


def test_a_grid_has_all_combinations_and_tied_fields_move_together() -> None:
    made = grid(["model.dim=64,128 model.heads=2,4", "optim.betas=[0.9, 0.95],[0.9, 0.99]"])
    assert made == [
        {"model.dim": dim, "model.heads": heads, "optim.betas": betas}
        for dim, heads in (("64", "2"), ("128", "4"))
        for betas in ("[0.9, 0.95]", "[0.9, 0.99]")
    ]


@pytest.mark.parametrize(
    ("over", "said"),
    [
        (["model.dim"], "'model.dim': must have the form section.key=value,value,..."),
        (["model.dim="], "must have the form"),
        ([" "], "must have the form"),
        (["model.dim=1,2 model.heads=1"], "needs as many values: model.dim 2, model.heads 1"),
        (["model.dim=1,2", "model.dim=3"], "model.dim is varied twice"),
        (["model.dim=1 model.dim=2"], "model.dim is varied twice"),
        (["flops=1e12", "train.tokens=5"], "flops sets the number of tokens, so train.tokens cannot vary"),
        (["flops=-1"], "flops = -1: must be a number above 0"),
        (["a.b=" + ",".join(map(str, range(1001)))], "1,001 runs; a sweep has at most 1,000"),
    ],
)
def test_bad_grids(over: list[str], said: str) -> None:
    with pytest.raises(UserError) as error:
        grid(over)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--over", "model.dmi=16,32"],
            "--over model.dmi=16: model.dmi = 16: unknown key; did you mean 'dim'?",
        ),
        (["--over", "model.dim=16,x"], '--over model.dim=x: model.dim = "x": must be a whole number >= 1'),
        (["--over", "model.dim=16,33"], "model.dim = 33 must be divisible by model.heads = 2"),
        (
            ["--over", "train.tokens=64", "--hold-out", "bigest"],
            "--hold-out bigest: must be largest, size or",
        ),
        ([], "a sweep needs --over"),
        (["--over", "data.source=nowhere.txt"], "nowhere.txt"),
    ],
)
def test_bad_values_are_refused_before_anything_runs(
    arguments: list[str], said: str, base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*base, *arguments) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()


def test_environments_share_cores_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert running.environment(0, 1, 2, 8, ["0"]) == {}
    assert running.environment(1, 2, 2, 8, []) == {"OMP_NUM_THREADS": "2"}
    assert running.environment(1, 2, 2, 8, list("0123"))["CUDA_VISIBLE_DEVICES"] == "2,3"
    with pytest.raises(UserError, match=r"a run needs 2.*Nearest valid: --jobs 1"):
        running.environment(0, 2, 2, 8, ["0", "1"])


def test_a_sweep_from_start_to_page(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run fails, which is said, and the others go on; a larger grid runs only what is new; FLOPs become tokens."""
    sweep, abort = tmp_path / "sweep", ["--set", "faults.on_nonfinite=abort"]
    assert run(*base, *abort, "--over", "optim.lr=1e-3,1e30", "--jobs", "2") == 1
    out = capsys.readouterr().out
    assert "lr1e-3: N 9" in out
    assert "lr1e30: failed, exit code 2: error: " in out
    assert f"try again with: fivefold sweep {sweep}" in out
    before = (sweep / "lr1e-3" / "metrics.jsonl").stat().st_mtime_ns

    again = [*base, *abort, "--over", "optim.lr=1e-3,1e30,1e-2", "--json"]
    assert run(*again) == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert [(row["name"], row["status"]) for row in found["runs"]] == [
        ("lr1e-3", "finished"),
        ("lr1e30", "failed"),
        ("lr1e-2", "finished"),
    ]
    assert "3 runs, 1 finished before" in captured.err
    assert (sweep / "lr1e-3" / "metrics.jsonl").stat().st_mtime_ns == before, "it was not run again"
    done = found["runs"][2]
    assert done["val_loss"] == lines(sweep / "lr1e-2", "val_loss")[-1]
    assert done["flops"] == 6 * done["parameters"] * 3 * 64
    assert found["why_no_law"].startswith("too few runs for a fit: 1 with 1 size")

    page = (sweep / "report.html").read_text("utf-8")
    assert "failed: lr1e30" in Page(page).text
    parts = unpacked(page)["sweep"]["parts"]
    assert ["h2", "Loss by optim.lr"] in parts
    assert parts[-1][1][0].startswith("lr1e30: failed exit code 2")
    assert run(*base, "--over", "optim.lr=1e-3") == 2
    assert "holds a sweep with another --set; resume it with" in capsys.readouterr().err


def test_flops_become_tokens(base: list[str]) -> None:
    sets = [word for flag, word in pairwise(base) if flag == "--set"]
    made = table.make("quickstart", sets, None, ["model.dim=16,32", "flops=2e7"])
    running.plan(made, "quickstart")
    for row in made.rows:
        assert row.figures["flops"] == pytest.approx(2e7, rel=6 * row.figures["parameters"] * 64 / 2e7)
        assert made.load("quickstart", row).train.tokens == row.figures["tokens"]
    assert [row.name for row in made.rows] == ["dim16", "dim32"]


def test_a_stopped_sweep_resumes(base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SIGTERM comes when the first run is finished and the second is under way."""
    ended = running._Runs._ended

    def stop_after_one(self: running._Runs, row: table.Row, code: int, seconds: float) -> None:
        ended(self, row, code, seconds)
        if row.status == FINISHED:
            os.kill(os.getpid(), signal.SIGTERM)

    sweep, long = tmp_path / "sweep", tmp_path / "sweep" / "steps40000"
    with monkeypatch.context() as patched:
        patched.setattr(running._Runs, "_ended", stop_after_one)
        assert run(*base, "--over", "train.steps=2,40000,3", "--jobs", "2") == 75
    made = table.read(sweep)
    assert [row.status for row in made.rows] == [FINISHED, STOPPED, WAITING]
    reached = max(lines(long, "step"), default=0) if (long / "metrics.jsonl").exists() else 0
    made.rows[1].settings = {"train.steps": f"{reached + 2}"}  # it would take minutes
    table.write(sweep, made)
    assert run("sweep", str(sweep)) == 0
    assert {row.status for row in table.read(sweep).rows} == {FINISHED}
    assert len(lines(long, "loss")) == reached + 2
    assert f"resuming after step {reached}" in (long / "log.txt").read_text() or not reached


def test_a_saved_sweep_is_read_with_care(tmp_path: Path) -> None:
    made = table.make("quickstart", ["train.steps=3"], "dp=1", ["optim.lr=1e-3,2e-3"])
    table.write(tmp_path, made)
    assert table.read(tmp_path) == made
    assert load(tmp_path / table.BASE) == load("quickstart")
    content = json.loads((tmp_path / table.FILE).read_text())
    for change, said in (
        ({"format": 9}, "format 9; this version reads 1"),
        ({"runs": [{**content["runs"][0], "name": "../x"}]}, "'../x' is no name of a run"),
        (
            {"runs": [{**content["runs"][0], "figures": {"parameters": "<b>"}}]},
            "figures.parameters is no number",
        ),
        (
            {"runs": [{**content["runs"][0], "status": "finished"}]},
            "is damaged, or was not written by Fivefold",
        ),
        ({"runs": [3]}, "is damaged, or was not written by Fivefold"),
    ):
        (tmp_path / table.FILE).write_text(json.dumps(content | change))
        with pytest.raises(UserError, match=said):
            table.read(tmp_path)
