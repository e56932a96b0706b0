"""A run folder or a model made by somebody else: nothing outside of it is read, written or removed through a link."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from data_recipes import recipe_of, write
from pool_runs import train_rank
from typer.testing import CliRunner

from fivefold import files
from fivefold.checkpoint.source import export_run, import_folder
from fivefold.cli.main import app
from fivefold.errors import LONGEST_MESSAGE, CheckFailed, CommunicationError, UserError, printable
from fivefold.files import reading, writing
from fivefold.launch import verdict
from fivefold.recipe import Recipe, change, load
from fivefold.train.generate import open_run
from fivefold.train.start import run_command
from fivefold_play.state import State

SECRET = "of somebody else"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps."""
    home = tmp_path_factory.mktemp("hostile")
    source = write(home / "text.txt", "some text to train on\n" * 200)
    recipe = change(
        recipe_of(source, home / "cache", tokenizer="bytes", val_fraction=0.0),
        ["model.layers=1", "model.dim=16", "model.heads=2", "model.seq_len=16", "train.steps=2"],
    )
    recipe = change(
        recipe, ["train.global_batch_size=2", "checkpoint.every=1", "observe.tracker=tensorboard"]
    )
    train_rank(0, 1, recipe, home / "run")
    return home / "run"


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def longer(run: Path) -> Recipe:
    return load(run / "recipe.toml", ["train.steps=3"])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "name",
    ["machine.json", "plan.json", "metrics.jsonl.tmp", "metrics.jsonl", "recipe.toml", "report.html", "tokenizer.json"],
)  # fmt: skip
@pytest.mark.parametrize("dangling", [False, True])
def test_a_linked_file_is_not_written_through(copy: Path, tmp_path: Path, name: str, dangling: bool) -> None:
    recipe, target = longer(copy), tmp_path / "outside" / "target"
    target.parent.mkdir()
    if not dangling:
        target.write_text(SECRET)
    (copy / name).unlink(missing_ok=True)
    (copy / name).symlink_to(target)
    with pytest.raises(UserError, match=f"{name} leads out of .*{copy.name}"):
        files.guard(copy)
    with pytest.raises(UserError):
        run_command(recipe, out=copy, resume=True, fork=False)
    assert contents(target.parent) == ({} if dangling else {"target": SECRET.encode()})


def test_a_tokenizer_that_is_not_the_runs(copy: Path, tmp_path: Path) -> None:
    """Two tokens exchanged, or none: each use says so, and resuming puts the run's own back."""
    path = copy / "tokenizer.json"
    own = path.read_bytes()
    spec = json.loads(own)
    vocab = spec["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(spec))
    for use in (open_run, lambda run: export_run(run, tmp_path / "out")):
        with pytest.raises(UserError, match=r"tokenizer.json has other tokens than .*step-00000002"):
            use(copy)
        path.rename(tmp_path / "away")
        with pytest.raises(
            UserError, match=r"tokenizer.json is missing: the run was trained with a tokenizer"
        ):
            use(copy)
        (tmp_path / "away").rename(path)
    train_rank(0, 1, longer(copy), copy, resume=True)
    assert path.read_bytes() == own
    export_run(copy, tmp_path / "out")


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "traces"])
def test_a_linked_folder_stays_as_it_is(copy: Path, run: Path, tmp_path: Path, name: str) -> None:
    """`keep_last` would remove another run's checkpoints."""
    other = Path(shutil.copytree(run, tmp_path / "other"))
    (other / name).mkdir(exist_ok=True)
    before = contents(other)
    shutil.rmtree(copy / name, ignore_errors=True)
    (copy / name).symlink_to(other / name)
    with pytest.raises(UserError, match=f"{name} leads out of"):
        run_command(longer(copy), out=copy, resume=True, fork=False)
    assert contents(other) == before


@pytest.mark.parametrize("name", files.UNOPENED)
def test_links_of_wandb_make_no_run_unreadable(
    name: str, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb itself makes them (findings/wandb_log_link.sh), `wandb.save` others; a pipe hinders nobody there either."""
    of_start = copy / name / "offline-run-20261129_012242-a110d2cec40c" / "logs"
    of_start.mkdir(parents=True)
    (tmp_path / "core.log").write_text(SECRET)
    (of_start / "debug-core.log").symlink_to(tmp_path / "core.log")
    (of_start / "gone.log").symlink_to(tmp_path / "gone")
    (copy / name / "latest-run").symlink_to(tmp_path)
    shutil.copytree(copy, tmp_path / "sweep" / "first", symlinks=True)
    os.mkfifo(of_start / "pipe")
    before = contents(copy / name)
    monkeypatch.chdir(tmp_path)
    words = [["generate", "copy", "--max-tokens", "2"], ["report", "copy"], ["checkpoints", "copy"],
             ["checkpoints", "copy", "--verify"], ["export", "copy", "hf"], ["eval", "copy", "core.log"],
             ["report", "copy", "sweep/first", "--out", "x.html"]]  # fmt: skip
    for one in words:
        done = CliRunner().invoke(app, one)
        assert done.exit_code == 0, (one, done.output, done.exception)
    run_command(longer(copy), out=copy, resume=True, fork=False)
    run_command(change(longer(copy), ["train.init_from=copy"]), out=tmp_path / "next", fork=False)
    files.guard(tmp_path / "sweep")
    State([tmp_path]).require(copy)
    assert contents(copy / name) == before
    with pytest.raises(UserError, match="leads out of"):  # nothing of ours reads there
        files.read_bytes(of_start / "debug-core.log", 100)
    shutil.rmtree(copy / name)
    (copy / name).symlink_to(tmp_path)
    with pytest.raises(UserError, match=f"{name} leads out of"):
        files.guard(copy)


def test_a_link_that_is_made_later_is_not_opened(tmp_path: Path) -> None:
    home, outside = tmp_path / "run", tmp_path / "outside"
    home.mkdir()
    outside.mkdir()
    files.guard(home)
    (home / "traces").symlink_to(outside)
    (outside / "secret").write_text(SECRET)
    with pytest.raises(UserError, match="leads out of"):
        files.read_bytes(home / "traces" / "secret", 100)
    with pytest.raises(UserError, match="leads out of"):
        files.write_atomically(home / "traces" / "new", "text")
    assert contents(outside) == {"secret": SECRET.encode()}


def test_a_folder_that_is_named_from_elsewhere_is_guarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a path with `..`, as a user types it."""
    (tmp_path / "here").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "secret").write_text(SECRET)
    monkeypatch.chdir(tmp_path / "here")
    home = Path("../run")
    files.guard(home)
    (home / "metrics.jsonl").symlink_to(tmp_path / "secret")
    for way in (home, home.absolute(), tmp_path / "run"):
        with pytest.raises(UserError, match="leads out of"):
            files.read_bytes(way / "metrics.jsonl", 100)


@pytest.mark.slow
def test_links_within_a_folder_and_to_it_are_followed(copy: Path, tmp_path: Path) -> None:
    (copy / "newest").symlink_to(copy / "checkpoints")
    (tmp_path / "name").symlink_to(copy)
    run_command(longer(copy), out=tmp_path / "name", resume=True, fork=False)
    assert (copy / "checkpoints" / "step-00000003").is_dir()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says where an open file lies")
@pytest.mark.parametrize("name", ["read", "write", "write on", "append"])
def test_a_link_that_comes_between_a_look_and_an_open_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Nothing of the file outside is read or changed."""
    home, secret = tmp_path / "home", tmp_path / "secret"
    home.mkdir()
    (home / "file").write_text("ours")
    secret.write_text("secret")
    files.guard(home)
    inside = reading.inside

    def swap(path: Path, opened: int | None = None) -> Path:
        found = inside(path, opened)
        if opened is None:
            path.unlink()
            path.symlink_to(secret)
        return found

    monkeypatch.setattr(reading, "inside", swap)
    monkeypatch.setattr(writing, "inside", swap)
    do = {
        "read": files.open_file,
        "write": files.stream,
        "write on": lambda path: files.stream_on(path, 2),
        "append": lambda path: files.Lines(path).write("more"),
    }
    with pytest.raises(UserError, match="leads out of"):
        do[name](home / "file")
    assert secret.read_text() == "secret"


@pytest.mark.parametrize("name", ["metrics.jsonl", "tokenizer.json", "traces/histogram-step-1.json"])
def test_a_pipe_does_not_block(copy: Path, name: str) -> None:
    (copy / name).unlink(missing_ok=True)
    (copy / name).parent.mkdir(exist_ok=True)
    os.mkfifo(copy / name)
    for command in (["report", str(copy)], ["generate", str(copy)], ["train", str(copy), "--resume"]):
        result = CliRunner().invoke(app, command)
        assert isinstance(result.exception, UserError), (command, result.output)
        assert "neither a file nor a folder" in str(result.exception)


def test_an_import_copies_nothing_from_outside(run: Path, tmp_path: Path) -> None:
    model, secret = export_run(run, tmp_path / "model"), tmp_path / "secret"
    secret.write_text((model / "tokenizer.json").read_text())
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        shutil.copyfile(model / name, secret)
        (model / name).unlink()
        (model / name).symlink_to(secret)
        with pytest.raises(UserError, match=f"{name} leads out of"):
            import_folder(model, tmp_path / "imported")
        assert not (tmp_path / "imported").exists()
        (model / name).unlink()
        shutil.copyfile(secret, model / name)


def test_a_snapshot_of_the_hub_links_to_its_blobs(run: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    export_run(run, snapshot)
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir()
    for file in list(snapshot.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(Path("../../blobs") / file.name)
    assert (import_folder(snapshot, tmp_path / "imported") / "tokenizer.json").is_file()


@pytest.mark.parametrize("kind", [UserError, CheckFailed, CommunicationError])
def test_messages_are_printable_and_short(kind: type[Exception]) -> None:
    escape, reversal, surrogate = "\x1b]0;owned\x07\x9b31m\r", "\u202e", "\udcff"
    message = str(kind(f"key {escape}{reversal}{surrogate} ü {'x' * 300_000}{escape} Nearest valid: 4"))
    assert len(message) <= LONGEST_MESSAGE
    assert printable(message) == message
    assert message.startswith("key \\x1b]0;owned\\x07\\x9b31m\\r\\u202e\\udcff ü xxx")
    assert message.endswith("Nearest valid: 4")
    message.encode("utf-8")
    assert str(kind(message)) == message


@pytest.mark.parametrize(
    "name", ["write", "write_atomically", "stream", "lines", "make_folder", "rename", "remove", "locked"]
)
def test_every_write_stays_inside(tmp_path: Path, name: str) -> None:
    home, outside = tmp_path / "run", tmp_path / "outside"
    for folder in (home, outside):
        folder.mkdir()
    files.guard(home)
    (home / "link").symlink_to(outside)
    (outside / "kept").write_text(SECRET)
    path = home / "link" / "kept"
    calls = {
        "write": lambda: files.write(path, "text"),
        "write_atomically": lambda: files.write_atomically(path, "text"),
        "stream": lambda: files.stream(path),
        "lines": lambda: files.Lines(path),
        "make_folder": lambda: files.make_folder(path.with_name("new")),
        "rename": lambda: files.rename(files.stream(home / "own").name and home / "own", path),
        "remove": lambda: files.remove(path),
        "locked": lambda: files.locked(path).__enter__(),
    }
    with pytest.raises(UserError, match="leads out of"):
        calls[name]()
    assert contents(outside) == {"kept": SECRET.encode()}


def test_last_words_of_a_rank_are_printable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(verdict.FOLDER, str(tmp_path))
    verdict.leave("failed", f"Traceback: \x1b]0;owned\x07 \udcff {'x' * 300_000}")
    (said,) = (path.read_text() for path in tmp_path.iterdir())
    assert said.startswith("Traceback: \\x1b]0;owned\\x07 \\udcff xxx")
    assert len(said) <= verdict.LONGEST_TEXT + 100
