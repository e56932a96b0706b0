"""Trackers: what each of them has after a run, and that none of them stops one."""

import csv
import importlib
import json
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import data_recipes
import pytest
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.errors import UserError
from fivefold.observe import trackers
from fivefold.observe.metrics import MetricsWriter, read_metrics
from fivefold.recipe import change, load
from fivefold.recipe import entries as names
from fivefold.train.start import run_command

ABOUT = {"data": {"source": "https://me:hidden@host/x.txt?sig=hidden"}, "train": {"steps": 9, "tokens": None}}


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]


def write(folder: Path, tracker: str, steps: Sequence[int], start: int = 0) -> None:
    with closing(MetricsWriter(folder, tracker, step=start, about=ABOUT)) as writer:
        for step in steps:
            assert writer.write({"step": step, "loss": 1.0 + step, "lr": 0.5}) == ""
        writer.write({"step": steps[-1], "val_loss": 2.0, "val_accuracy": 0.25, "sample": "a, b"})


def test_every_tracker_has_its_code() -> None:
    assert trackers.KINDS.keys() == names.TRACKERS.keys()


def test_a_recipe_names_one_or_several(tmp_path: Path) -> None:
    def of(text: str, *sets: str) -> list[str]:
        path = tmp_path / "recipe.toml"
        path.write_text(f"[train]\nsteps = 9\n[observe]\n{text}\n")
        return names.chosen(load(path, sets).observe.tracker)

    assert of("") == ["tensorboard"]
    assert of('tracker = "csv, wandb,csv"') == ["csv", "wandb"]
    assert of('tracker = ["csv", "mlflow"]') == ["csv", "mlflow"]
    assert of("tracker = []") == of('tracker = "none"') == []
    assert of("", "observe.tracker=none") == []
    assert of('tracker = "csv"', "observe.tracker=tensorboard") == ["tensorboard"]


def test_csv_has_a_row_per_line(tmp_path: Path) -> None:
    write(tmp_path, "csv", [1, 2])
    first = [{"step": str(step), "loss": str(1.0 + step), "lr": "0.5"} for step in (1, 2)]
    validation = {"step": "2", "val_loss": "2.0", "val_accuracy": "0.25"}
    assert rows(tmp_path) == [*first, validation]
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("3,4")  # a row that a crash cut
    write(tmp_path, "csv", [2], start=1)
    assert rows(tmp_path) == [*first, validation]
    with closing(MetricsWriter(tmp_path, "csv", step=2)) as writer:
        writer.rewind(1)
        assert rows(tmp_path) == first[:1]
    write(tmp_path, "csv", [1])
    assert len(rows(tmp_path)) == 2, "a run that starts again"


class Failing:
    """Takes two calls."""

    def __init__(self, folder: Path, step: int, about: Mapping[str, Any]) -> None:
        self.left = 2

    def write(self, lines: Sequence[trackers.Line]) -> None:
        self.left -= len(lines)
        if self.left < 0:
            raise ConnectionError(
                "no answer from https://me:hidden@host/api?key=hidden for sesame\nat line 3"
            )

    def rewind(self, step: int) -> None: ...
    def close(self) -> None: ...


@pytest.mark.parametrize("apart", [False, True], ids=["here", "on a thread"])
def test_a_tracker_that_fails_does_not_stop_training(
    apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(trackers.KINDS, "wandb", (Failing, apart))
    monkeypatch.setenv("WANDB_API_KEY", "sesame")
    with closing(MetricsWriter(tmp_path, "wandb,csv")) as writer:
        said = [writer.write({"step": step, "loss": 1.0}) for step in range(1, 7)]
    said += capsys.readouterr().err.splitlines()
    (warning,) = (text for text in said if text)
    assert "tracker wandb" in warning
    assert "ConnectionError: no answer from https://host/api for $WANDB_API_KEY. metrics.jsonl" in warning
    assert len(read_metrics(tmp_path)) == len(rows(tmp_path)) == 6


def test_a_tracker_that_cannot_begin_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> trackers.Sink:
        raise RuntimeError("no login")

    monkeypatch.setitem(trackers.KINDS, "mlflow", (refuses, True))
    monkeypatch.setitem(trackers.KINDS, "wandb", (refuses, False))
    writer = MetricsWriter(tmp_path, "mlflow,wandb")
    sink = writer._trackers._open["mlflow"]
    assert isinstance(sink, trackers.Behind)
    sink._thread.join()
    said = writer.write({"step": 1, "loss": 1.0})
    assert "tracker wandb ends at step 0: RuntimeError: no login" in said
    assert "tracker mlflow ends at step 1: RuntimeError: no login" in said
    writer.close()


def test_a_missing_library_is_an_error_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(names.TRACKERS, "wandb", ("no_such_module", "wandb"))
    recipe = change(load("quickstart"), ["observe.tracker=csv,wandb"])
    with pytest.raises(
        UserError, match=r'observe.tracker = "wandb": the library .* `pip install .fivefold\[wandb\]'
    ):
        run_command(recipe, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def wandb_records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: 7 bytes, then LevelDB's log, here of one block."""
    content = path.read_bytes()
    assert content[:4] == b":W&B"
    at = 7
    while at + 7 <= min(len(content), 1 << 15):
        size, kind = struct.unpack_from("<HB", content, at + 4)
        if kind != 1:
            return
        yield content[at + 7 : at + 7 + size]
        at += 7 + size


def wait_for_another_second() -> None:
    """W&B names a run's folder by the second in which it begins, so another start in that second would write there,
    too."""
    time.sleep(1.01 - time.time() % 1)


def write_elsewhere(folder: Path, tracker: str, steps: Sequence[int], start: int) -> None:
    """`write` in a process of its own, as users resume. (W&B's service knows a run by its id, and may still be closing
    it when the same process starts it again.)"""
    call = f"import pathlib, test_trackers as t; t.write(pathlib.Path({str(folder)!r}), {tracker!r}, {steps}, {start})"
    subprocess.run([sys.executable, "-c", call], cwd=Path(__file__).parent, check=True)


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs the extra `wandb`")
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    run, key = tmp_path / "run", "0123456789abcdef" * 3
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    write(run, "wandb", [1, 2])
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", key)
    wait_for_another_second()
    write_elsewhere(run, "wandb", [3], start=2)
    written = sorted((run / "wandb").glob("offline-run-*/*.wandb"))
    assert len(written) == 2
    assert len({path.stem for path in written}) == 1, "a resumed run continues the same one"
    for path in run.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert b"hidden" not in content, path
        assert key.encode() not in content, path
    found: list[dict[str, Any]] = []
    for data in (data for path in written for data in wandb_records(path)):
        (record := records.Record()).ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            found.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
    assert [(row["step"], row.get("train/loss"), row.get("val/accuracy")) for row in found] == [
        (1, 2.0, None), (2, 3.0, None), (2, None, 0.25), (3, 4.0, None), (3, None, 0.25),
    ]  # fmt: skip


def test_a_run_that_wandb_and_mlflow_have_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is read, exported and resumed as any other, whatever these libraries left in it."""
    for name in ("wandb", "mlflow"):
        pytest.importorskip(name, reason=f"needs the extra `{name}`")
    for name in ("WANDB_API_KEY", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    source, run = data_recipes.write(tmp_path / "text.txt", "some text to train on\n" * 200), tmp_path / "run"
    sets = ["model.layers=1", "model.dim=16", "model.heads=2", "model.seq_len=16", "train.steps=2",
            "train.global_batch_size=2", "checkpoint.every=1", "observe.tracker=wandb,mlflow"]  # fmt: skip
    recipe = change(
        data_recipes.recipe_of(source, tmp_path / "cache", tokenizer="bytes", val_fraction=0.0), sets
    )
    run_command(recipe, out=run, fork=False)
    assert [path for path in run.rglob("*") if path.is_symlink()], "wandb links to its log"
    wait_for_another_second()
    run_command(load(run / "recipe.toml", ["train.steps=3"]), out=run, resume=True, fork=False)
    assert len([*run.glob("wandb/offline-run-*")]) == 2
    for words in (["generate", str(run), "--max-tokens", "2"], ["report", str(run)],
                  ["checkpoints", str(run), "--verify"], ["export", str(run), str(tmp_path / "hf")]):  # fmt: skip
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, (words, done.output)


def test_wandb_is_not_led_away(tmp_path: Path) -> None:
    """wandb opens the files of a start by names that can be foreseen: links that wait there are refused."""
    home, outside = tmp_path / "wandb", tmp_path.parent / "outside"
    past, future = home / "run-20200101_000000-ab", home / "offline-run-29990101_000000-ab"
    for folder in (past, future):
        (folder / "logs").mkdir(parents=True)
    (past / "logs" / "debug-core.log").symlink_to(outside)
    trackers._require_unlinked(home)
    (future / "run-ab.wandb").symlink_to(outside)
    with pytest.raises(UserError, match="leads out of"):
        trackers._require_unlinked(home)


def test_mlflow_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra `mlflow`")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    run = tmp_path / "run"
    write(run, "mlflow", [1, 2])
    write(run, "mlflow", [3], start=2)
    client = mlflow.MlflowClient(tracking_uri=(run / "mlruns").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("fivefold").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["train.steps"] == "9"
    assert found.data.params["data.source"] == "https://host/x.txt"
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(one.step, one.value) for one in history] == [(1, 2.0), (2, 3.0), (3, 4.0)]
    assert found.data.metrics["val/accuracy"] == 0.25
